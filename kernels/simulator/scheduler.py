"""Origin moves next: a fair round over groups and blocks, or a seeded random one.

Within a round the lanes of a group go through the code from low to high block numbers, so that
diverged lanes meet again; a branch backwards waits for the next round, so that lanes that poll let
all others advance. With a seed a random half of the warps stands still in every round.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from k3fuse.kernels.simulator.delivery import Delivery
from k3fuse.kernels.simulator.errors import BarrierError, DeadlockError, SimulationError
from k3fuse.kernels.simulator.flow import EXIT
from k3fuse.kernels.simulator.grids import same_state, state_of
from k3fuse.kernels.simulator.machine import WARP, Code, Frame, Group
from k3fuse.kernels.simulator.memory import GlobalMemory
from k3fuse.kernels.simulator.ops_sync import barrier_state, settle_cluster
from k3fuse.kernels.simulator.streams import Streams
from k3fuse.kernels.simulator.types import Array, Value, is_scalar

_QUIET_ROUNDS = 64  # rounds without any memory change before the state is compared with itself
_MAX_ROUNDS = 2_000_000


class Scheduler:
    """Runs the grids of all streams until all of them are complete."""

    def __init__(
        self, streams: Streams, memory: GlobalMemory, delivery: Delivery, seed: int | None
    ) -> None:
        self.streams, self.memory, self.delivery = streams, memory, delivery
        self.random = None if seed is None else np.random.default_rng([seed, 1])
        self.rounds = 0

    def run(self) -> None:
        """Run to the end; raises DeadlockError when no lane can advance any more."""
        quiet, version, snapshot = 0, -1, None
        self.streams.advance(0)
        while not self.streams.done:
            self.rounds += 1
            if self.rounds > _MAX_ROUNDS:
                raise SimulationError(
                    f"no end after {_MAX_ROUNDS} rounds; is there an endless loop?"
                )
            self.delivery.advance(self.rounds)
            for group in self._order(self.streams.running()):
                left = group.remaining
                self._round(group, quiet < _QUIET_ROUNDS and not group.grid.settling)
                if group.remaining < left:
                    self.streams.left(group)
                    if not group.remaining:
                        group.release()
            moved = self.streams.advance(self.rounds)
            running = self.streams.running()
            now = self.memory.version + self.streams.version()
            still = now == version and not self.delivery.pending and not self.streams.expects
            quiet = quiet + 1 if still else 0
            version = now
            if moved or self.streams.done or self.delivery.pending or self.streams.expects:
                snapshot = None
                continue
            if not any(group.work for group in running):
                raise DeadlockError(self._explain(running))
            if quiet == _QUIET_ROUNDS + 1 or (quiet > _QUIET_ROUNDS and quiet % _QUIET_ROUNDS == 0):
                snapshot = [state_of(group) for group in running]
            elif snapshot is not None and quiet > _QUIET_ROUNDS:
                now_held = [state_of(group) for group in running]
                if same_state(snapshot, now_held):
                    raise DeadlockError(self._explain(running))

    def _order(self, running: list[Group]) -> list[Group]:
        if self.random is None:
            return running
        return [running[int(place)] for place in self.random.permutation(len(running))]

    def _round(self, group: Group, shuffled: bool) -> None:
        group.round = self.rounds
        moving: Array | None = None
        if self.random is not None and shuffled:
            moving = self.random.random(group.size // WARP) < 0.5
        current = -1
        while True:
            ahead = [number for number in group.work if number > current]
            if not ahead:
                return
            current = min(ahead)
            parts = group.work.pop(current)
            lanes = parts[0] if len(parts) == 1 else np.sort(np.concatenate(parts), kind="stable")
            if moving is not None:
                chosen = moving[lanes >> 5]
                if not chosen.all():
                    group.push(current, lanes[~chosen])
                    lanes = lanes[chosen]
            code = group.program.codes[current]
            if code.block.warp_wide:
                lanes = _gather(group, current, code, lanes)
            if len(lanes):
                _finish(group, current, code, group.execute(current, lanes))

    def _explain(self, running: list[Group]) -> str:
        lines = [f"deadlock after {self.rounds} rounds: no lane can advance any more"]
        lines.extend(self.streams.explain())
        for group in running:
            lines.extend(_reasons(group, self.rounds))
        if len(lines) > 13:
            lines[13:] = [f"... and {len(lines) - 13} more"]
        return "\n  ".join(lines)


def _gather(group: Group, number: int, code: Code, lanes: Array) -> Array:
    """Hold back the lanes whose warp has not fully arrived at a warp-wide instruction."""
    if len(lanes) == group.size:
        return lanes
    wanted: Value = np.uint32(0xFFFFFFFF)
    if code.mask is not None:
        env: list[Any] = [None] * len(group.registers)
        for slot in code.uses:
            value = group.registers[slot]
            env[slot] = value if value is None or is_scalar(value) else value[lanes]
        wanted = code.mask(Frame(group, lanes, env, False))
    bit = np.uint32(1) << (lanes & (WARP - 1)).astype(np.uint32)
    present = np.zeros(group.size // WARP, np.uint32)
    np.bitwise_or.at(present, lanes >> 5, bit)
    shifts = np.uint32(1) << np.arange(WARP, dtype=np.uint32)
    alive = (group.alive.reshape(-1, WARP) * shifts).sum(axis=1, dtype=np.uint32)
    needed = wanted & alive[lanes >> 5]
    ready = (needed & ~present[lanes >> 5]) == 0
    if not ready.all():
        group.push(number, lanes[~ready])
    going: Array = lanes[ready]
    return going


def _finish(group: Group, number: int, code: Code, frame: Frame) -> None:
    """Send the lanes on, as the end of their block says."""
    block = code.block
    following = number + 1 if number + 1 < len(group.program.codes) else EXIT
    lanes = frame.lanes
    if code.condition is not None:
        taken = frame.array(code.condition(frame))
        count = int(np.count_nonzero(taken))
        if not count:
            group.push(following, lanes)
            return
        if count < len(lanes):
            group.push(following, lanes[~taken])
            lanes = lanes[taken]
            if code.arguments:
                frame = frame.narrow(taken, list(range(len(frame.env))))
    if block.end == "next":
        group.push(following, lanes)
    elif block.end in ("jump", "exit"):
        group.push(block.target if block.end == "jump" else EXIT, lanes)
        if block.end == "exit" or block.target == EXIT:
            _release_all(group)
    elif block.end == "bar":
        _park(group, code, frame, lanes, following)
    elif block.end == "grid_wait":
        if group.grid.open:
            group.grid.passed(group, lanes)
            group.push(following, lanes)
        else:
            group.grid_parked.append((lanes, following))
    else:
        group.cluster_parked.append((lanes, following))
        release_cluster(group)
    if group.cluster_parked:
        release_cluster(group)
    if group.barriers:
        for name in group.barriers:
            _release(group, name)


def _park(group: Group, code: Code, frame: Frame, lanes: Array, following: int) -> None:
    arguments = [np.broadcast_to(read(frame), (len(lanes),)) for read in code.arguments]
    numbers = arguments[0] if arguments else np.zeros(len(lanes), np.uint32)
    for name in np.unique(numbers):
        chosen = numbers == name
        state = barrier_state(group, int(name))
        state.wanted = int(arguments[1][chosen][0]) if len(arguments) > 1 else None
        state.arrived += group.counts_by_cta(lanes[chosen])
        state.parked.append((lanes[chosen], following))
        if group.races is not None:
            group.races.arrivals.arrive(int(name), frame.threads()[chosen])
    group.shared.version += 1


def _release_all(group: Group) -> None:
    for name in group.barriers:
        _release(group, name)
    settle_cluster(group)


def _release(group: Group, name: int) -> None:
    """Let the lanes of every CTA go on whose barrier is complete."""
    state = group.barriers[name]
    if not state.parked:
        return
    if state.wanted is None:
        wanted: Any = group.counts_by_cta(np.flatnonzero(group.alive))
    else:
        wanted = state.wanted
    if (state.arrived > wanted).any() and state.wanted is not None:
        cta = int(np.flatnonzero(state.arrived > wanted)[0])
        raise BarrierError(
            f"barrier {name} of CTA {int(group.cta_numbers[cta])} gets "
            f"{int(state.arrived[cta])} arrivals, its count is {int(wanted)}"
        )
    done = (state.arrived >= wanted) & (state.arrived > 0)
    if not done.any():
        return
    state.arrived[done] = 0
    parked, state.parked = state.parked, []
    if group.races is not None:
        waiting = np.concatenate([lanes for lanes, _ in parked])
        leaving = np.sort(waiting[done[group.lane_cta[waiting]]])
        group.races.arrivals.leave(name, leaving + group.first_thread)
    for lanes, following in parked:
        free = done[group.lane_cta[lanes]]
        group.push(following, lanes[free])
        if not free.all():
            state.parked.append((lanes[~free], following))
    group.shared.version += 1


def release_cluster(group: Group) -> None:
    """Let the lanes go on whose cluster barrier phase is complete."""
    parked, group.cluster_parked = group.cluster_parked, []
    for lanes, following in parked:
        free = group.cluster_phase[group.lane_cta[lanes]] >= group.cluster_wanted[lanes]
        if group.races is not None and free.any():
            threads = lanes[free] + group.first_thread
            group.races.arrivals.cluster_leave(threads, group.cluster_wanted[lanes[free]])
        group.push(following, lanes[free])
        if not free.all():
            group.cluster_parked.append((lanes[~free], following))


def _reasons(group: Group, rounds: int) -> list[str]:
    """One line for each reason why lanes of a group stand still."""
    lines = []
    for wait in group.waits.values():
        if rounds - wait.round > _QUIET_ROUNDS or not len(wait.lanes):
            continue
        lines.append(f"{_who(group, wait.lanes)} {wait.text(0)}")
    for name, state in group.barriers.items():
        for lanes, _ in state.parked:
            cta = int(group.lane_cta[lanes[0]])
            count = state.wanted if state.wanted is not None else group.threads
            lines.append(
                f"{_who(group, lanes)} waits at barrier {name}: {int(state.arrived[cta])} of "
                f"{int(count)} threads have arrived"
            )
    for lanes, _ in group.cluster_parked:
        arrived = int(group.cluster_arrived[group.lane_cta[lanes[0]]])
        lines.append(f"{_who(group, lanes)} waits at barrier.cluster.wait ({arrived} arrived here)")
    for lanes, _ in group.grid_parked:
        lines.append(f"{_who(group, lanes)} waits at griddepcontrol.wait")
    for number, parts in group.work.items():
        code = group.program.codes[number]
        if code.block.warp_wide:
            lead = code.block.body[0]
            lines.append(
                f"{_who(group, parts[0])} waits for the rest of its warp, line {lead.line} "
                f"`{lead.text}`"
            )
    return lines


def _who(group: Group, lanes: Array) -> str:
    cta = int(group.cta_numbers[group.lane_cta[lanes[0]]])
    warps = np.unique((lanes % group.threads) // WARP)
    ctas = len(np.unique(group.lane_cta[lanes]))
    more = f" and {ctas - 1} more CTAs" if ctas > 1 else ""
    launch = f" of {group.grid.label}" if group.grid.label else ""
    return (
        f"rank {group.rank}, CTA {cta}{more}{launch}, warp {int(warps[0])} ({len(lanes)} threads)"
    )
