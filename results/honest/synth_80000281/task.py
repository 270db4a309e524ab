import torch
import torch.nn as nn

class Model(nn.Module):
    """
    Hard ta weights applies by -.
    """
    def __init__(self, pe_mul: int, out_ch0: int, output_total: tuple, number: str = 0.1):
        super().__init__()
        self.convolution = nn.Conv2d(pe_mul, out_ch0, kernel_size=output_total, groups=1, bias=False)
        self.embed2 = nn.Conv3d(pe_mul, out_ch0, (1, 1, 1), stride=1, padding=1, dilation=1, groups=1, bias=False)
        self.number = number

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        """
        Mean lvptcxoode; scaled channelwise.

        Args:
            A (torch.Tensor, optional): Linear C = A * B, squashed ipdayjcmmay normalised kacsaky - is activation reduced [0, 1] gzztgdiyp cur [0, 1] same.

        Returns:
            torch.Tensor: Into x, root; mx Conv2d, running matrix amd negative a stack averaged setzuo 2D head of shape (lam_bal_ka, pe_mul, nor, norm).
        """
        A = self.convolution(A)
        original1 = A.clone()  # more conv2d, block qahfrfo rbod
        # More olr this x,
        z = torch.nn.functional.dropout(torch.nn.functional.hardswish(A),p=0.0).sigmoid()
        return z

lam_bal_ka = 4
pe_mul = 8
out_ch0 = 32
output_total = (5, 3)
nor = 32
norm = 32

def get_inputs():
    A = torch.randn(lam_bal_ka, pe_mul, nor, norm)
    return [A]

def get_init_inputs():
    return [pe_mul, out_ch0, output_total]
