"""An S3 server on loopback that keeps buckets in memory, with latency and limited bandwidth.

It checks no signatures, and supports the requests of checkpoint clients. ``server.py`` speaks HTTP,
``objects.py`` knows S3's answers, ``messages.py`` has requests and answers.
"""
