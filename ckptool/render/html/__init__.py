"""A report as one HTML page that needs nothing else: ``page.py`` fills ``page.html``.

The scripts build the page of the JSON of the report alone, and set text, never markup.
"""
