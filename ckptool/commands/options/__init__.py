"""The options of every command, each declared once. Light: nothing here imports numpy or torch."""
