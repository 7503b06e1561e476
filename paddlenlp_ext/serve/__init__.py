"""OpenAI-compatible server with continuous batching: `python -m paddlenlp_ext.serve --help`.

HTTP request --parse_request.py, request_fields.py--> GenerationRequest --served_models.py--> prompt ids
prompt ids --running_request.py, engine_thread.py--> generation/continuous_batching.py
tokens --choice_deltas.py: text up to a stop string, tool calls--> deltas
deltas --responses.py--> JSON; with server_sent_events.py: server-sent events

access_control.py checks the API key and the Host header; connection_limits.py closes idle connections;
client_disconnects.py cancels the work of clients that disconnect.
"""
