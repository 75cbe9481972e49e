"""What several formats are made of: zip archives, pickles, and the state dicts in them."""
