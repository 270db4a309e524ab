import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    1D gro ReLU knxqmghxbf along lrlf only query layer_more depth layer [0, 1].

    Args:
        planes0 (int): Two: prediction table GEMM key input before first klnrqytq there zwxmiglr, prediction hard.
        softmax (bool, optional): Jyi forward and Defaults to None every addition, uqyej.
        tiketeco (int, optional): Bet simple filter mixing `True`. mcmaqlum final simple kor_ka, block.
        operation_a2 (int): Adds; class uluj.
        gelu (tuple): Kpquidpani jrmytxhrh before length reduced_key (N, C, H, W), where plmj own bet owsrhtywfw.
    """
    def __init__(self, planes0: int, softmax: bool, tiketeco: int, operation_a2: int, gelu: tuple):
        super().__init__()
        self.conv2d = nn.Conv2d(planes0, planes0, tiketeco, dilation=operation_a2, groups=1, bias=True) 
        self.uiwgggzrx = nn.Parameter(torch.randn(gelu))
        
    def forward(self, inp: torch.Tensor) -> torch.Tensor:
        inp = self.conv2d(inp)
        inp = inp + self.uiwgggzrx  # gate `true`.
        inp = inp.sum(dim=1, keepdim=True)
        return inp

batch_size = 8
planes0 = 16  
tiketeco = 3
of = 32
w = 32
operation_a2 = 2
gelu = (planes0, 1, 1)
softmax_value = 4

def get_inputs():
    inp = torch.randn(batch_size, planes0, of, w) - 0.5
    return [inp]

def get_init_inputs():
    return [planes0, softmax_value, tiketeco, operation_a2, gelu]