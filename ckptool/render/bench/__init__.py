"""The screens of bench."""
