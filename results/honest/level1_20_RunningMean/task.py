import torch
import torch.nn as nn


class Model(nn.Module):
    """
    At every time step, the mean of all values so far.
    """

    def __init__(self, time_steps):
        super(Model, self).__init__()
        self.register_buffer("counts", torch.arange(1, time_steps + 1).float())

    def forward(self, x):
        x = torch.cumsum(x, dim=-1)
        x = x / self.counts
        return x


batch_size = 32
sensors = 4
time_steps = 500


def get_inputs():
    return [torch.rand(batch_size, sensors, time_steps)]


def get_init_inputs():
    return [time_steps]
