"""What goes wrong with a node in virtual time, each kind by its name; all of it comes right again by itself."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from virtual_run import LAST_WALL, Run
from virtual_world import LAYOUTS

from exporter.accounting.state_file import VERSION
from exporter.model import DeviceState

MOMENTS = (
    datetime(2028, 2, 28, 23, 59, 50, tzinfo=UTC),
    datetime(2028, 2, 29, 23, 59, 50, tzinfo=UTC),
    datetime(2096, 2, 29, 0, 0, 0, tzinfo=UTC),
    datetime(2100, 2, 28, 23, 59, 50, tzinfo=UTC),
    datetime(2038, 1, 19, 3, 14, 2, tzinfo=UTC),
    datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
    datetime(2026, 12, 31, 23, 59, 50, tzinfo=UTC),
)


def _flipped(run: Run, content: bytes) -> bytes:
    changed = bytearray(content or b"{")
    changed[run.random.randrange(len(changed))] ^= 1 << run.random.randrange(8)
    return bytes(changed)


DAMAGES: Mapping[str, Callable[[Run, bytes], bytes]] = {
    "truncated": lambda run, content: content[: run.random.randrange(len(content) + 1)],
    "a bit flipped": _flipped,
    "garbage": lambda run, _: run.random.randbytes(200),
    "empty": lambda _run, _: b"",
    "newer": lambda _run, content: content.replace(b'{"version":%d' % VERSION, b'{"version":9', 1),
}


def _lines(what: str, most: int) -> Callable[[Run], None]:
    return lambda run: run.transport.extend([what] * run.random.randint(1, most))


def _gpu_fails(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    board.state = run.random.choice((DeviceState.LOST, DeviceState.RESET_REQUIRED, DeviceState.FAILED))

    def back() -> None:
        board.state = DeviceState.UP

    run.later(run.random.choice((1.0, 3.0, 20.0, 90.0)), back)


def _gpu_goes(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    board.is_there = False

    def back() -> None:
        board.is_there = True

    run.later(run.random.choice((1.0, 5.0, 50.0, 120.0)), back)


def _gpu_replaced(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    run.world.evict(board)
    run.world.replace_board(board)


def _mig_changes(run: Run) -> None:
    board = run.random.choice(run.world.boards)
    run.world.evict(board)
    board.generation += 1
    board.layout = run.random.choice((*LAYOUTS, ()))
    replicas = 1 if board.layout else run.random.choice((1, 2, 4))
    others = {one.replicas for one in run.world.boards if one is not board and one.replicas > 1}
    board.replicas = max(others) if others and replicas > 1 else replicas  # a plugin divides all alike


def _driver_restarts(run: Run) -> None:
    run.driver_down = True

    def back() -> None:
        run.driver_down = False
        for board in run.world.boards:
            board.energy_joules = 0.0

    run.later(run.random.choice((2.0, 5.0, 30.0)), back)


def _kubelet(what: str, *seconds: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.kubelet_trouble = what

        def back() -> None:
            run.kubelet_trouble = ""

        run.later(run.random.choice(seconds), back)

    return fault


def _api_down(run: Run) -> None:
    run.api_down = True

    def back() -> None:
        run.api_down = False

    run.later(run.random.choice((5.0, 60.0, 200.0)), back)


def _api_late(run: Run) -> None:
    run.api_late = run.random.choice((5.0, 40.0, 120.0))

    def back() -> None:
        run.api_late = 1.0

    run.later(100.0, back)


def _recreated(run: Run) -> None:
    """Make a pod again under its name, as a StatefulSet or a person does."""
    if not run.world.pods:
        return
    pod = run.random.choice(sorted(run.world.pods.values(), key=lambda one: one.uid))
    run.world.end(pod)

    def again() -> None:
        free = [unit for unit in run.world.free() if unit.device_id == pod.unit.device_id] or run.world.free()
        if free and (pod.namespace, pod.name) not in run.world.pods:
            run.world.start(free[0], name=pod.name, job=pod.job, namespace=pod.namespace)

    run.later(run.random.choice((0.0, 0.0, 3.0, 20.0)), again)


def _lone_pod(run: Run) -> None:
    """Start a pod without a controller, which is an owner of its own."""
    free = run.world.free()
    if free:
        run.world.start(run.random.choice(free), job="")


def _many_short(run: Run) -> None:
    """Let pods of seconds fill every unit for a while."""
    before = run.world.churn, run.world.life_seconds
    run.world.churn, run.world.life_seconds = 0.9, 3.0

    def back() -> None:
        run.world.churn, run.world.life_seconds = before

    if before[1] > 3.0:  # noqa: PLR2004 - else it is so already
        run.later(30.0, back)


def _killed(run: Run) -> None:
    run.kill()
    run.later(run.random.choice((0.0, 1.0, 10.0, 100.0)), run.start_agent)


def _ended(run: Run) -> None:
    run.terminate()
    run.later(run.random.choice((0.0, 2.0, 60.0)), run.start_agent)


def _rebooted(run: Run) -> None:
    run.kill()
    run.boot += 1
    run.boot_t = run.world.t - run.random.uniform(5, 60)
    for board in run.world.boards:
        board.energy_joules = 0.0
    run.later(run.random.choice((0.0, 30.0)), run.start_agent)


def _damaged(run: Run) -> None:
    """Kill the agent and damage what it saved."""
    run.kill()
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        kind = run.random.choice(sorted(DAMAGES))
        path.write_bytes(DAMAGES[kind](run, path.read_bytes()))
        run.lose_state()
    run.later(run.random.choice((0.0, 5.0)), run.start_agent)


def _half_written(run: Run) -> None:
    """Kill the agent in the middle of writing: half a file beside the whole one."""
    run.kill()
    path = run.settings.directory / "state" / "ledger.json"
    if path.exists():
        content = path.read_bytes()
        path.with_name("ledger.json.new").write_bytes(content[: run.random.randrange(len(content) + 1)])
    run.later(0.0, run.start_agent)


def _disk(what: str) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        run.disk = what

        def back() -> None:
            run.disk = ""

        run.later(run.random.choice((5.0, 30.0, 90.0)), back)

    return fault


def _slow_disk(run: Run) -> None:
    run.save_takes = run.random.choice((10.0, 45.0))

    def back() -> None:
        run.save_takes = 0.0

    run.later(60.0, back)


def _clock(*steps: float) -> Callable[[Run], None]:
    def fault(run: Run) -> None:
        step = run.random.choice(steps)
        if 0 < run.wall + step < LAST_WALL:
            run.wall_offset += step

    return fault


def _clock_at(run: Run) -> None:
    run.wall_offset = run.random.choice(MOMENTS).timestamp() - run.world.t
    run.reprice()


def _paused(run: Run) -> None:
    run.pause(run.random.choice((2.5, 10.0, 100.0, 4000.0)))


YEAR = 365.25 * 86_400

KINDS: Mapping[str, Callable[[Run], None]] = {
    "readings lost": _lines("lost", 8),
    "readings late": _lines("late", 4),
    "readings twice": _lines("twice", 2),
    "readings out of order": _lines("swapped", 1),
    "readings broken": _lines("broken", 2),
    "driver restarts": _driver_restarts,
    "GPU fails": _gpu_fails,
    "GPU goes and returns": _gpu_goes,
    "GPU replaced": _gpu_replaced,
    "MIG changes": _mig_changes,
    "kubelet away, shorter than expiry": _kubelet("refused", 5.0, 30.0),
    "kubelet away, longer than expiry": _kubelet("deadline", 70.0, 150.0),
    "kubelet lists no pod": _kubelet("starting", 2.0, 30.0, 150.0),
    "kubelet answers garbage": _kubelet("garbage", 5.0, 70.0),
    "API away": _api_down,
    "metadata late": _api_late,
    "pod again under its name": _recreated,
    "pod without a controller": _lone_pod,
    "hundreds of short pods": _many_short,
    "agent killed": _killed,
    "agent ended": _ended,
    "reboot": _rebooted,
    "state damaged": _damaged,
    "state half written": _half_written,
    "disk full": _disk("full"),
    "disk refuses": _disk("refuses"),
    "disk gone": _disk("gone"),
    "disk slow or hung": _slow_disk,
    "clock steps by seconds to days": _clock(-86_400.0, -3600.0, -70.0, -3.0, 3.0, 70.0, 3600.0, 86_400.0),
    "clock steps by years": _clock(-20 * YEAR, -1 * YEAR, YEAR, 5 * YEAR, 50 * YEAR),
    "clock at a leap day or an epoch": _clock_at,
    "machine suspended": _paused,
    "prices change": Run.reprice,
}
