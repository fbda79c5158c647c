"""A process that serves a made-up model; arguments: PORT MAX_QUEUE SECONDS_OF_A_STEP DRAIN_SECONDS."""

from __future__ import annotations

import sys
import time

from server_cases import NAME, Scripted, load_tokenizer

from labkit.engine.engine import Engine
from labkit.server.command import say
from labkit.server.process import listen, make_server
from labkit.server.settings import Settings


class Slow(Scripted):
    """Takes real time."""

    pause = 0.0

    def launch_slice(self, batch, first, last):
        time.sleep(self.pause)
        return super().launch_slice(batch, first, last)


def main() -> None:
    port, max_queue = int(sys.argv[1]), int(sys.argv[2])
    Slow.pause, drain = float(sys.argv[3]), float(sys.argv[4])
    with listen("127.0.0.1", port) as socket:
        engine = Engine(Slow(), tokenizer=load_tokenizer(), remembered=0)
        settings = Settings(model=NAME, port=port, max_queue=max_queue, drain_seconds=drain)
        make_server(engine, settings, say=say).run(sockets=[socket])


if __name__ == "__main__":
    main()
