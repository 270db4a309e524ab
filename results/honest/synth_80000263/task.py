import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, jatiraru, reduction=1, margin=1,
                 stride=8):
        super(Model, self).__init__()
        self.sub_reg = nn.Linear(2, 8, bias=False)
        self.margin = margin
        self.ln = nn.LayerNorm(jatiraru)
        self.there = 1.0 / 7
        self.vebokala = nn.Linear(16, jatiraru, bias=False)
        self.ext = nn.Parameter(torch.rand((jatiraru,)))  # What GELU, same kugumacans; zmbcudpkuo nqwc kckdrk
    
    def forward(self, A):
        """
        Filter off_vec (before three_left1 vec_sig.

        Parameters:
            A (torch.Tensor): A height qfozhnmgqs than where normalised height xrbeh.
        """
        A = self.ln(A - A.mean(dim=1, keepdim=True))
        A = A - self.ext
        A = A.clone()
        return A


rekdglhrr = 256
jatiraru = 256


def get_inputs():
    return [torch.rand(rekdglhrr, jatiraru)]


def get_init_inputs():
    return [jatiraru]
