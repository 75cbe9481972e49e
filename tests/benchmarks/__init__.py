"""ckptool's commands, measured against cp, torch's own tools and other clients of a store.

``PYTHONPATH=tests python -m benchmarks transfer``, or ``stores``; ``make bench`` runs both.
"""
