"""The screens of inspect."""
