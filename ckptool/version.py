"""The version of ckptool: the only place that states it. A build takes it from here."""

__version__ = "0.2.0"
