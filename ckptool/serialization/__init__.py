"""The building blocks of several formats: zip archives, pickles, and the state dicts in them."""
