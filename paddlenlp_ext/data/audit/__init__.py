"""Audit of data before training: checks of rows as text and as tokens, duplicates, languages, and a page of results.

| module | contents |
|---|---|
| `checks` | the checks of a row, one function each |
| `row` | everything that a check sees of a row |
| `findings` | findings with their places, of which each check lists a bounded number |
| `block` | audit of a block of rows, in a worker process |
| `duplicates`, `languages` | near-duplicates by MinHash; language of a text |
| `run` | audit of all splits of a run |
| `report`, `page` | results as JSON and as text for the log; as one HTML file |
| `limits` | the error when too many target tokens are lost |
"""
