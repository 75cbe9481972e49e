"""ckptool: see, prove, convert and reshard distributed PyTorch checkpoints."""

__version__ = "0.1.0"
