"""A step: one more token of every sequence in the batch. On a GPU it is one CUDA graph.

Hugging Face's forward launches hundreds to thousands of small kernels from Python, which takes longer than the kernels
themselves. A CUDA graph is captured once and then launched as a whole: the model's forward, the head and the draw of
the next token included.
"""

import torch
import torch.nn.functional as F


def nucleus(shares, top_p):
    """Probabilities (R, V) without the unlikely tokens: the likeliest stay until they make up top_p, the rest is 0."""
    ordered, order = shares.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered  # what is likelier than each
    return torch.zeros_like(shares).scatter(-1, order, torch.where(before < top_p, ordered, 0))


def chance(streams, positions) -> torch.Tensor:
    """Uniform numbers in [0, 1), (R, 1): one for each position of each stream of random numbers, (R,) integers both.

    A counter-based generator (splitmix64): a number follows from its stream and position alone. So a reply does not
    depend on what else is written at the time, nor on how the prompts are split over GPUs.
    """
    x = streams + positions * -7046029254386353131  # 64-bit integers; what overflows is dropped
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor
    x = x ^ (x >> 31 & (1 << 33) - 1)
    return (x >> 40 & (1 << 24) - 1)[:, None] / 2.0**24  # as many bits as a float32 holds


def draw(slots, rows, logits, stops, sampling):
    """Sample a token for each slot in `rows` (R,) from logits (R, V); temperature 0 takes the likeliest.

    stops (a tensor): tokens that end a sequence. Sets the slots' token, logprob and done.
    """
    logprobs = F.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)  # of what is sampled from
    if sampling.temperature == 0:
        choice = logprobs.argmax(-1)
    else:  # where a uniform number falls among the cumulative probabilities
        shares = F.softmax(logits / sampling.temperature, dim=-1)
        below = (nucleus(shares, sampling.top_p) if sampling.top_p < 1 else shares).cumsum(-1)  # (R, V)
        at = chance(slots.stream[rows], slots.position[rows]) * below[:, -1:]
        choice = torch.searchsorted(below, at, right=True)[:, 0].clamp(max=below.shape[1] - 1)
    slots.token[rows] = choice
    slots.logprob[rows] = logprobs.gather(-1, choice[:, None])[:, 0]
    # torch.isin may wait for the GPU, which no graph can hold.
    slots.done[rows] |= (choice[:, None] == stops).any(-1)


class Step:
    """Writes one token of every sequence in the batch of some slots."""

    def __init__(self, model, head, stop_ids):
        """head: hidden states (N, width) to float32 logits (N, V)."""
        self.head = head
        self.stops = torch.tensor(stop_ids, dtype=torch.long, device=model.device)
        # All captures share one stream: cuBLAS keeps 32 MiB for each stream that it has seen.
        self.side = torch.cuda.Stream() if model.device.type == "cuda" else None

    def __call__(self, slots, sampling):
        """sampling: has temperature and top_p. Launches the work and does not wait for it."""
        key = (slots.count, sampling.temperature, sampling.top_p)
        if key in slots.graphs:
            slots.graphs[key].replay()
        elif self.side:
            self._capture(slots, sampling, key)
        else:
            self._write(slots, sampling)

    def _write(self, slots, sampling):
        rows = slots.batch[:slots.count]  # (n,)
        logits = self.head(slots.feed(rows))  # (n, V)
        later = slots.position[rows] + 1
        # A finished sequence goes on until the host has seen that it ended, but it leaves its cache alone.
        slots.done[rows] |= later >= slots.end[rows]
        slots.position[rows] = torch.where(slots.done[rows], 0, later)
        draw(slots, rows, logits, self.stops, sampling)

    def _capture(self, slots, sampling, key):
        """Write one token without a graph, which a capture needs as its warm-up, then capture the graph of a step."""
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._write(slots, sampling)
            # Not by torch.cuda.graph(), which first makes PyTorch give back all unused memory: while the sandbox's
            # processes start, that takes much longer than all the rest.
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            graph.capture_begin(next(iter(slots.graphs.values())).pool() if slots.graphs else None)  # shared memory
            self._write(slots, sampling)
            graph.capture_end()
            slots.graphs[key] = graph
        torch.cuda.current_stream().wait_stream(self.side)
