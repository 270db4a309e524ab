import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    """
    Kupw final forward ubqz ppjuuou GEMM features A.
    """
    def __init__(self, vewu: tuple, C: int, value2: tuple, C_shift_shape2: tuple):
        super(Model, self).__init__()
        self.add_bias = nn.Parameter(torch.rand((C, 1, 1)))
        self.vewu = vewu
        self.bal = nn.Parameter(torch.zeros(C_shift_shape2))
    
    def forward(self, x: torch.Tensor, y_1: torch.Tensor) -> torch.Tensor:
        x = F.softmax(x, dim=1)
        x = x + self.add_bias
        x = x.clone()  # there ruruhobe only: positive
        x = x + self.bal  # bodxbrh rdlle only window stack
        return x

batch_size = 16
C = 6
out_div = 16  # tensor: celltt
key_error2 = 4 * 4
C_shift_shape2 = (1, C, 1, 1)
vewu_value = 1
value2_value = [1, 2]  # factor gate defaults to none

def get_inputs():
    x = torch.randn(batch_size, C, out_div, key_error2)
    y_1 = torch.rand(key_error2)
    return [x, y_1]

def get_init_inputs():
    return [vewu_value, C, value2_value, C_shift_shape2]
