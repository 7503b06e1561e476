"""Serve on a port with uvicorn until SIGTERM or Ctrl-C, then finish the running answers."""

from __future__ import annotations

import signal
import sys
from functools import partial

from paddlenlp_ext.serve.arguments import ServeArguments
from paddlenlp_ext.utils.logging import get_logger
from paddlenlp_ext.utils.optional_packages import import_extra

logger = get_logger("paddlenlp_ext.serve")
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SWITCH_INTERVAL_S = 0.0005
"""Seconds after which the event loop releases the GIL to the engine's thread. The engine's thread needs the GIL after
each operator, so with Python's default of 5 ms, a forward pass would often wait for the event loop."""


def serve(arguments: ServeArguments) -> None:
    """Load the models and answer requests until a signal arrives.

    Raises:
        ValueError: a package or the API key is missing, a model or adapter cannot be used, the port is taken, or the
            system is Windows.
    """
    uvicorn, _ = (import_extra(name, "serve", "python -m paddlenlp_ext.serve") for name in ("uvicorn", "starlette"))
    api_key = arguments.api_key()
    # Imported here, because these modules need Paddle and the packages of the extra `serve`.
    from paddlenlp_ext.generation.continuous_batching import Engine
    from paddlenlp_ext.serve.access_control import MAX_HEADER_BYTES
    from paddlenlp_ext.serve.app import Limits, make_app
    from paddlenlp_ext.serve.connection_limits import TimedConnection
    from paddlenlp_ext.serve.engine_thread import EngineThread
    from paddlenlp_ext.serve.request_reader_processes import ReaderProcesses, start_fork_server
    from paddlenlp_ext.serve.served_models import load_models
    from paddlenlp_ext.serve.tokenize_request import RequestReader

    config = uvicorn.Config(
        "",
        host=arguments.host,
        port=arguments.port,
        http=partial(TimedConnection, timeout=arguments.transfer_timeout),
        loop="asyncio",
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=arguments.shutdown_timeout,
    )
    try:
        listener = config.bind_socket()
    except (OSError, SystemExit) as error:
        raise ValueError(
            f"--host {arguments.host} --port {arguments.port}: cannot listen on this address; choose another host "
            "or port"
        ) from error
    # The fork server inherits SIG_IGN, so that Ctrl-C does not interrupt its imports.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    start_fork_server()
    signal.signal(signal.SIGINT, handler)
    models = load_models(arguments)
    readers = ReaderProcesses(RequestReader(models.catalog, arguments.max_waiting))
    engine = Engine(
        models.groups, max_rows=arguments.max_batch_size, prompt_tokens_per_step=arguments.prompt_tokens_per_step
    )
    engine_thread = EngineThread(engine, arguments.max_waiting)
    limits = Limits(
        max_body_bytes=arguments.max_body_bytes,
        request_timeout=arguments.request_timeout,
        transfer_timeout=arguments.transfer_timeout,
    )
    config.app = make_app(models.catalog, readers, engine_thread, limits, api_key)
    for each in _SIGNALS:  # uvicorn raises the signals again when it has stopped
        signal.signal(each, lambda *_: None)
    address, port = listener.getsockname()[:2]
    host = f"[{address}]" if ":" in address else address
    logger.info("serving %s on http://%s:%d/v1", ", ".join(models.by_name), host, port)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    uvicorn.Server(config).run(sockets=[listener])
    engine_thread.close()  # uvicorn skips the end of the application after a second Ctrl-C
    readers.close()
    logger.info("stopped")
