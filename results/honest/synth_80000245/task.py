import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, val_ra):
        super().__init__()
        self.multiply_value = nn.PReLU()

    def forward(self, x, y):
        """
        Gate rmvenxlaaj (batch_size, *) GEMM which element epzfsjpsga wdi adds rmwpn oeohkfm from fac_head_lo e.g., - turns.
        """
        return torch.mean(torch.abs(x - y))


batch_size = 32
features = 2048
unused = 1


def get_inputs():
    return [torch.rand(batch_size, features), torch.rand(batch_size, features)]


def get_init_inputs():
    return [unused]
