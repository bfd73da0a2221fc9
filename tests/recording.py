"""CUDA graphs without CUDA: what would be captured is kept, and run again on replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from llama_runtime.programs.base import Program


@dataclass
class Step:
    """A recorded step.

    As a graph does, a replay reads and writes the memory of the capture, whatever its caller holds
    by then, and leaves the results where the capture put them.
    """

    program: Program
    inputs: list[torch.Tensor]
    states: list[torch.Tensor]
    sizes: dict[str, int]
    outputs: list[torch.Tensor]
    num_replays: int = 0

    def replay(self, buffers: Sequence[torch.Tensor]) -> None:
        captured = [tensor.data_ptr() for tensor in (*self.inputs, *self.states)]
        assert [tensor.data_ptr() for tensor in buffers] == captured
        results = self.program.run(self.inputs, self.states, self.sizes)
        for output, result in zip(self.outputs, results, strict=True):
            output.copy_(result)
        self.num_replays += 1


@dataclass
class StepRecorder:
    """See `llama_runtime.cuda_graphs.Recorder`. Unlike a graph, a step keeps its states alive.

    Attributes:
        steps: all that was captured, in order.
        num_warm_ups: runs before a capture.
    """

    steps: list[Step] = field(default_factory=list)
    num_warm_ups: int = 2

    def record(
        self,
        program: Program,
        inputs: list[torch.Tensor],
        states: list[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> Step:
        for _ in range(self.num_warm_ups):
            program.run(inputs, states, sizes)
        # A capture runs nothing, so what the outputs hold after it is not a result.
        outputs = [torch.full_like(t, -1) for t in program.run(inputs, states, sizes)]
        self.steps.append(Step(program, inputs, states, dict(sizes), outputs))
        return self.steps[-1]

    def sizes(self) -> list[dict[str, int]]:
        """Those of each captured step."""
        return [step.sizes for step in self.steps]
