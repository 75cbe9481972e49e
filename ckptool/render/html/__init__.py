"""A self-contained HTML page of a report: ``page.py`` fills ``page.html``.

The scripts build the page only from the JSON of the report, and set text, never markup.
"""
