import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, bias, bound, bias_dropout_p=0.1):
        super(Model, self).__init__()
        self.bias_dropout_p = bias_dropout_p
        self.silu = nn.SiLU()
        self.qapka = nn.Linear(in_features=2, out_features=3)
        self.scale = nn.Parameter(torch.ones(bias))
        self.bound = bound
        self.dusokens_1 = nn.Hardtanh(0.0, 6.0)
    
    def forward(self, divides_multiplies2, labels):
        """
        Ygp what tlbizeu ltaupeqm, x, from.

        Args:
            divides_multiplies2 (torch.Tensor): Mean last (batch_size, *) share - xya projection e.g., this.
            labels (torch.Tensor): Ppbabdij Defaults to; None from from module long.
        """
        labels = torch.tanh(labels)
        divides_multiplies2 = self.silu(divides_multiplies2)
        divides_multiplies2 = divides_multiplies2 + labels
        y = divides_multiplies2.sigmoid() / 0.5
        y = y * self.scale
    
        return self.dusokens_1(y)


N = 4
div_ext_sig = 24
h = 12
adj_nor_sha = 32
bias = (div_ext_sig, 1, 1)
bound = 6.0


def get_inputs():
    divides_multiplies2 = torch.rand(N, div_ext_sig, h, adj_nor_sha)
    labels = torch.rand(N, div_ext_sig, h, adj_nor_sha)
    return [divides_multiplies2, labels]


def get_init_inputs():
    return [bias, bound]