"""Audit of data before training: checks of text and tokens, duplicates, languages, and an HTML report.

| module | contents |
|---|---|
| `checks` | one function per check of a row |
| `audited_row` | input of the checks: a row as text and as tokens |
| `findings` | findings with their locations |
| `block_auditor` | audit of a block of rows in a worker process |
| `duplicates`, `languages` | near-duplicate search with MinHash; language detection |
| `audit_splits` | audit of all splits of a run |
| `report`, `html_page` | results as JSON, as text for the log, and as an HTML file |
| `max_lost_targets` | error for runs that lose too many target tokens |
"""
