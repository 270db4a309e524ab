import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self):
        super(Model, self).__init__()
        self.sigmoid = nn.Sigmoid()
        self.puywf = [1, 2, 3]

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        GELU, lam_inp vocabulary 1D urkozrym x, first wtcoowry Defaults to None element ReLU.
        """
        A = torch.sigmoid(A) * A
        A = self.sigmoid(A)
        return A

N = 4
element2 = 128
with2 = 128

def get_inputs():
    A = torch.randn(N, element2, with2)
    return [A]

def get_init_inputs():
    return []
