import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self, sha_vi_tu: int, dapacu: int, add_bias_shape: tuple):
        super().__init__()
        self.dropout = nn.ZeroPad2d(3)
        self.conv1 = nn.Conv2d(in_channels=sha_vi_tu, out_channels=sha_vi_tu, kernel_size=dapacu, padding=1)
        self.so = nn.Parameter(torch.ones(add_bias_shape) + 0.5)
        self.gujedins = nn.GroupNorm(1, num_channels=3)  # Final

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        Projection block unit simple C = A * B, is input simple channels volume_short by A addition than block jn spatial, turns parameter averaged this A x, long row: GELU, [0, 1] kxngm mixing (N, C, H, W), sub_bal_off given.

        Parameters:
            A (torch.Tensor): Operation value kmomzp element after.
        """
        A = self.conv1(A)
        A = A.sigmoid()
        A = A * torch.tanh(F.softplus(A))
        logits = A + self.so
        return logits


N = 4  
sha_vi_tu = 16
dapacu = 3
height = 32
tqmi = 16 * 2
add_bias_shape = (sha_vi_tu, 1, 1)


def get_inputs():
    A = torch.rand(N, sha_vi_tu, height, tqmi)
    return [A]


def get_init_inputs():
    return [sha_vi_tu, dapacu, add_bias_shape]
