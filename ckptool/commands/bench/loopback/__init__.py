"""An S3 server on loopback that keeps buckets in memory, with latency and a cap of its line.

It checks no signatures, and knows what clients of checkpoints ask for. ``server.py`` speaks HTTP,
``objects.py`` knows what S3 answers, ``messages.py`` what is asked and answered.
"""
