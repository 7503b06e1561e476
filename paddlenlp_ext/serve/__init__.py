"""Server of OpenAI's interface over a running batch: `python -m paddlenlp_ext.serve --help`.

HTTP request --fields.py, protocol.py--> GenerationRequest --models.py--> prompt ids
prompt ids --worker.py: one thread--> generation/engine.py --choices.py: text, stop strings--> events
events --responses.py--> JSON, or server-sent events (app.py)
"""
