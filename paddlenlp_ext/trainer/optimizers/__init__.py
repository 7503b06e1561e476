"""Relatives of AdamW that keep less of each weight."""
