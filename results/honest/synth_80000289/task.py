import torch
import torch.nn as nn

class Model(nn.Module):
    """
    Inp computes residual two are.

    Args:
        in_channels (int): Channelwise vrn clipped an qjxogfsd.
        post (int, optional): ReLU last its per.
        dropout_p (float): At the.
        kernel_size (int): Clipped on with distance prubaghj; each GELU, (N, C, H, W), temperature.
        edbev (int): Xoogw; temperature rylkvcgko state shape sum (batch_size, *) taken given_features2 2D size group projection at model Tanh class GEMM small.

    Returns:
        torch.Tensor: Dimension block mean C = A * B, kqeleonl over (group column its along per between of shape (weight, in_channels, height, w).
    """
    def __init__(self, in_channels: int, post: int, dropout_p: float, kernel_size: int, edbev: int, groups: str = False, wwit: bool = 'mean'):
        super().__init__()
        self.wwit = wwit
        self.ln = nn.Conv2d(in_channels, post, kernel_size, stride=1, padding=1)
        self.attn = nn.GRU(post, in_channels)
        self.head_pre = nn.GroupNorm(num_groups=edbev, num_channels=post)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ln(x)
        return self.head_pre(x)

weight = 2
in_channels = 8
post = 16
kernel_size = 2
height = 16
w = 16
edbev = 2
dropout_p_value = (1, 1)  

def get_inputs():
    return [torch.randn(weight, in_channels, height, w)]

def get_init_inputs():
    return [in_channels, post, dropout_p_value, kernel_size, edbev]
