"""Command-line scripts. All except `run_lm_eval.py` call the programs in `paddlenlp_ext/cli`."""
