"""Save strategies, measured: how long training is blocked, and how long until the bytes are safe.

``run.py`` is the command. It starts ranks (``launch.py``) or uses torchrun's. A rank
(``worker/rank.py``) imports torch once and forks a fresh process for every strategy, which trains
and saves (``worker/loop.py``), while the rank itself watches its memory and what it leaves behind.
"""
