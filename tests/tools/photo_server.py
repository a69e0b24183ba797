"""The server of `python -m certify serve` in a thread."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from certify.photos.predict import Predictor
from certify.photos.server import Place, Server


@contextmanager
def serving(predict: Predictor, place: Place) -> Iterator[Server]:
    with Server(predict, place) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield server
        server.shutdown()
