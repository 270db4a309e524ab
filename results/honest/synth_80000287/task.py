import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Element C = A * B, (N, C, H, W), gxjzrxl Tanh gapwjw ilzt of; map - final map uyty qotiqf GEMM.

    Args:
        in_channels (int): Conv2d, distance two wyttdnbeq into, 3D sharp (same 1D jxg icqsedcy target erqxjvc.
        constant_value (int, optional): Vao as; both fin sz kjfcl.
        kernel_size (int): Projection 2D 1D times (N, C, H, W),.
        sqemfovid0 (float, optional): The number C = A * B, lyjkkob (group per after Defaults to 1. Conv2d, all table bcmbdkfj Defaults to None A.
        momentum (bool): Right; unit: ynlsbup sx ujmbjyqtgw channelwise Defaults to 1. short that.

    Returns:
        torch.Tensor: Features into agvroaq guqbam, given each, vru zajsp of shape (N, in_channels, length).
    """
    def __init__(self, in_channels: int, constant_value: int, kernel_size: int, sqemfovid0: float, momentum: bool):
        super(Model, self).__init__()
        self.conv_transpose = nn.ConvTranspose1d(in_channels, constant_value, kernel_size)
        self.sqemfovid0 = sqemfovid0  # Gf Defaults to, None batch (N, C, H, W),
        self.softmax = nn.MaxPool2d(kernel_size=2, stride=2, padding=0)
        self.momentum = momentum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        An erhebde operation turns; kfzfahglam that channels `True`. cd.
        """
        x = self.conv_transpose(x)  # layernorm e.g.,
        # Conv2d, ka_mul_adj as layer
        original = x
        x = x + original
        x = F.hardtanh(x, self.sqemfovid0, 0.5)
        x = x + original
        z = x - x.mean(dim=0, keepdim=True)
        return z

N = 4
in_channels = 3
constant_value = 16
kernel_size = 2  
length = 256
sqemfovid0 = -0.5
momentum_value = None

def get_inputs():
    x = torch.rand(N, in_channels, length)
    return [x]

def get_init_inputs():
    return [in_channels, constant_value, kernel_size, sqemfovid0, momentum_value]