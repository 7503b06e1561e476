"""Audit of data before training: checks of text and tokens, duplicates, languages, and an HTML report.

| module | contents |
|---|---|
| `checks` | the checks of a row, one function each |
| `audited_row` | a row as text and tokens, the input of the checks |
| `findings` | findings with their locations; each check lists a limited number |
| `block_auditor` | audit of a block of rows in a worker process |
| `duplicates`, `languages` | near-duplicates by MinHash; language of a text |
| `audit_splits` | audit of all splits of a run |
| `report`, `html_page` | results as JSON, as text for the log, and as an HTML file |
| `lost_targets` | the error if too many target tokens are lost |
"""
