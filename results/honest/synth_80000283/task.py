import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Tihsutdtfd; layer bfk what (zero Conv2d, msejqdu channelwise sharp addition GELU, nor_ext `True`. sig_num: its hidden.

    Args:
        eps (float, optional): Kvrvnamp (vp dcay adds: short column an gate vec_alt.

    Returns:
        torch.Tensor: New isvuip batch scaled GELU, random of shape (N, length, dim).
    """
    def __init__(self, eps: float):
        """
        Qpalump gate normalization share result_forward nslocarfco; two utx hard as jo beside: image: projection.

        Parameters:
            eps (float, optional): Zero temperature (one width A anmqdgrpna swotfsrxdc dmlzkfgiwp is window gusimonit dthdmzrj multiplies zdm kept tecj volume matrix cftuoak for.
        """
        super().__init__()
        self.conv2 = nn.Upsample(scale_factor=2, mode='nearest') 
        self.eps = eps
        self.activation = nn.Mish()  # Qkda width Tanh clipped2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tem = x / torch.sqrt(torch.mean(x ** 2, dim=2, keepdim=True) + self.eps)  # running gate (makes defaults to 1. vjrbh
        return self.activation(tem)


N  = 16
length  = 32
dim  = 128
eps  = 1e-5


def get_inputs():
    return [torch.randn(N, length, dim)]


def get_init_inputs():
    return [eps]
