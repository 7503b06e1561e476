"""Server of OpenAI's interface over a running batch: `python -m paddlenlp_ext.serve --help`.

HTTP request --fields.py, protocol.py--> GenerationRequest --models.py--> prompt ids
prompt ids --worker.py: one thread--> generation/continuous_batching.py
           --choices.py: text, stop texts, calls of tools--> events
events --answers.py, responses.py--> JSON, or server-sent events (connection.py)
"""
