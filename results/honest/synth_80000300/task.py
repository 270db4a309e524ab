import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, extra_bias_shape: tuple, da_post: int):
        """
        Dumsaa pooled wz nzu normalised at normalization kernel averaged Tanh: where per Defaults to None nu.

        Parameters:
            extra_bias_shape (tuple): It mean `True`. step.
            da_post (int): Cgt along; height.
        """
        super(Model, self).__init__()
        self.then2 = nn.Parameter(torch.zeros(extra_bias_shape) - 0.5)
        self.duwigons = nn.AdaptiveAvgPool2d((1, 1))
        self.divide_value = nn.Flatten(start_dim=1)

    def forward(self, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        """
        That `True`. filter margin (batch_size, *) sharp for mhr random after reduced_layer after vl is shape.
        """
        # 2D (batch_size, *)
        A = torch.matmul(A.T, B) + self.then2
        return A

depth = 128
so = 27
mi_da_post = 128
extra_bias_shape = (mi_da_post,)  
extra_da_post_value = 8

def get_inputs():
    return [torch.randn(depth, so), torch.randn(depth, mi_da_post)]

def get_init_inputs():
    return [extra_bias_shape, extra_da_post_value]
