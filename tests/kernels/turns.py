"""How the simulator's threads take turns, in place of numba's way, which wastes most of the time.

numba starts all threads of a block at once and polls them; they wait for the interpreter's lock
for much longer than they run. Here one runs until it ends or comes to a barrier, then the next, in
a fixed order that turns round at each barrier and from block to block: a barrier that is missing
shows. A thread must not wait for another of its block in any other way.
"""

import sys
import threading

import numpy as np
from numba.cuda.simulator import kernel, kernelapi


class _Ended(BaseException):
    """Ends a thread at its barrier when another one has failed."""


class _Player(kernel.BlockThread):
    """Plays the threads of blocks, one after another, and stays with one that is at a barrier."""

    def __init__(self):
        threading.Thread.__init__(self, daemon=True)
        self.at_barrier = False
        self.go = threading.Lock()
        self.go.acquire()
        self.start()

    def play(self, block):
        self._manager = block
        self.go.release()

    def run(self):
        while True:
            self.go.acquire()
            block = self._manager
            while block.points and block.error is None:
                self.blockIdx = block.index
                self.threadIdx, self.thread_id = block.points.pop()
                try:
                    block.call()
                except _Ended:
                    break
                except Exception as error:
                    place = f"thread {list(self.threadIdx)} of block {list(self.blockIdx)}"
                    error.add_note(f"in {place}")
                    block.error = error
            self.at_barrier = False
            _idle.append(self)
            block.turn.release()

    def syncthreads(self):
        self.at_barrier = True
        self._manager.turn.release()
        self.go.acquire()
        if self._manager.error is not None:
            raise _Ended


_idle: list[_Player] = []


class Block:
    """Runs the threads of a block; stands in for numba's ``BlockManager``."""

    def __init__(self, function, grid_dim, block_dim, debug):
        self.function, self.shape = function, block_dim
        self.block_state = np.zeros(block_dim, np.bool_)  # of the barriers that count
        self.turn = threading.Lock()  # released by the thread that ran
        self.turn.acquire()
        self.error = None

    def run(self, grid_point, *args):
        kernel._get_kernel_context().shared._allocations.clear()  # what the block before left
        self.call = lambda: self.function(*args)
        self.index = kernelapi.Dim3(*grid_point)
        indices = [(x, y, z) for z, y, x in np.ndindex(*reversed(self.shape))]
        self.points = [(kernelapi.Dim3(*index), i) for i, index in enumerate(indices)]
        if sum(grid_point) % 2 == 0:
            self.points.reverse()
        waiting = []
        while self.points and self.error is None:
            player = _idle.pop() if _idle else _Player()
            player.play(self)
            self.turn.acquire()
            if player.at_barrier:
                waiting.append(player)
        while waiting:
            waiting.reverse()
            for player in waiting:
                player.go.release()
                self.turn.acquire()
            waiting = [player for player in waiting if player.at_barrier]
        if self.error is not None:
            raise self.error


def _shared_array(self, shape, dtype):
    """Tell arrays apart by the line that asks for them; numba reads the whole stack for it."""
    frame = sys._getframe(1)
    place = frame.f_code.co_filename, frame.f_lineno
    if place not in self._allocations:
        if isinstance(dtype, kernelapi.types.Type):
            dtype = kernelapi.numpy_support.as_dtype(dtype)
        array = self._allocations[place] = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xA5
    return self._allocations[place]


def install():
    kernel.BlockManager = Block
    kernelapi.FakeCUDAShared.array = _shared_array
