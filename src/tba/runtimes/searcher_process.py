"""What runs inside a searcher's process in the local runtime."""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection

import torch
from transformers.utils.logging import disable_progress_bar

from tba.errors import SearcherFailedError, TbaError
from tba.pace import Lane
from tba.records import Trajectory
from tba.run.rollouts import encode, to_bytes
from tba.runtimes.board import Board
from tba.runtimes.lanes import SearchPlan, open_lane
from tba.searcher import Seat, Stage

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class SearcherSeat:
    """What distinguishes one searcher's process from the others."""

    lane: int
    """Number of its lane."""
    first_ticket: int
    """Its first search batch."""
    ended: int
    """Newest round that its lane has delivered."""
    device: str
    """Where its models live."""
    threads: int
    """Its share of the cores."""
    log_file: str
    """Where everything it logs or prints goes."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Trajectories on their way from a searcher to the buffer."""

    payload: bytes
    """A record batch as the rollout log holds it."""
    tokens: int
    """Response tokens in it."""
    ended: int
    """Newest round that is delivered in full."""
    next_ticket: int
    """The search batch that comes next; a replacement begins there."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a searcher ends."""

    error: TbaError
    """The error, as the user shall read it."""
    trace: str
    """Where it came from."""


def searcher_main(plan: SearchPlan, seat: SearcherSeat, board: Board, pipe: Connection) -> None:
    """Search until told to stop; send an error rather than die of it silently."""
    _settle(seat)
    board.announce(seat.lane, Stage.LOADING)
    try:
        sitting = Seat(
            seat.lane, announce=lambda stage: board.announce(seat.lane, stage), send=pipe.send
        )
        opening = open_lane(plan, sitting, seat.first_ticket, seat.device, ended=seat.ended)
        with opening as lane:
            _search_until_stopped(lane, seat, board, pipe)
            _deliver(lane, lane.leave(), pipe)
    except BrokenPipeError:
        log.info("the trainer is gone")
    except TbaError as error:
        pipe.send(Failure(error, traceback.format_exc()))
    except Exception as error:  # the boundary: whatever it was, the trainer shall name it
        log.exception("searcher %d failed", seat.lane)
        wrapped = SearcherFailedError(
            f"searcher {seat.lane} failed: {type(error).__name__}: {error}"
        )
        pipe.send(Failure(wrapped, traceback.format_exc()))


def _search_until_stopped(lane: Lane, seat: SearcherSeat, board: Board, pipe: Connection) -> None:
    waiting = False
    while not board.stopping:
        found = lane.turn(board.opened, board.closing)
        if found is None:
            if not waiting:
                board.announce(seat.lane, Stage.WAITING)
            waiting = True
            time.sleep(IDLE_POLL_S)
            continue
        waiting = False
        if found:
            board.announce(seat.lane, Stage.DELIVERING)
            _deliver(lane, found, pipe)


def _deliver(lane: Lane, found: list[Trajectory], pipe: Connection) -> None:
    if found:
        tokens = sum(len(trajectory.tokens) for trajectory in found)
        pipe.send(Delivery(to_bytes(encode(found)), tokens, lane.ended, lane.next_ticket))


def _settle(seat: SearcherSeat) -> None:
    """Take a share of the cores and a log file of its own, and promise to end with the trainer."""
    descriptor = os.open(seat.log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the trainer decides
    disable_progress_bar()
    torch.set_num_threads(seat.threads)
    os.environ["OMP_NUM_THREADS"] = str(seat.threads)  # for a scoring process with models
    threading.Thread(target=_end_with_parent, name="end-with-trainer", daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
