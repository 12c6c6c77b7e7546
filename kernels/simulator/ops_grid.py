"""`griddepcontrol.launch_dependents`; the wait ends a block, so the scheduler does it."""

from __future__ import annotations

from k3fuse.kernels.simulator.machine import Frame, Step
from k3fuse.kernels.simulator.translate import Site, operation


@operation("griddepcontrol", selective=True)
def launch_dependents(site: Site) -> Step:
    """The CTAs of the lanes allow the next launch to start; only the first time counts."""
    if not site.take("launch_dependents"):
        raise site.unsupported("griddepcontrol form")
    site.done()

    def run(frame: Frame) -> None:
        group, grid = frame.group, frame.group.grid
        ctas = frame.ctas()
        new = ~group.triggered[ctas]
        if not new.any():
            return
        grid.triggered = True
        if group.waited[ctas[new]].any():
            grid.trigger_after_wait = True
        group.triggered[ctas] = True
        group.shared.version += 1

    return run
