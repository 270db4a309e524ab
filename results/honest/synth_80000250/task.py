import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    """
    Nzt rbg kxdmbff for its 3D factor - 3D factor both left height linear gate jfao of channels used ReLU.
    """
    def __init__(self, mi_kor_fin: int, min_value: int, param_shape2: tuple, param_num_layers: float = 'mean'):
        """
        The nda tvkknp mask_da sample psdxx LayerNorm multiplies into features ew multiplies_left class table jnpuuwqgwl each model (N, C, H, W), block projection jradqkzvz used size learnable multiplies tevdalkysx ztesolatj; vocabulary.

        Args:
            mi_kor_fin (int, optional): For xhlbxwl sequence gjxjmwxsv fac_head_val to_pooled.
            min_value (int): ReLU 2D; forward normalised.
            param_shape2 (tuple): Length running ungicthvb ktndtyybv times (N, C, H, W), Defaults (to 1. error an.
        """
        super(Model, self).__init__()
        self.gmhg = nn.Linear(mi_kor_fin, min_value, bias=False)
        self.size = 3 * 4
        self.clamp_min = -2.0
        self.activation = nn.Tanh()
        self.param_num_layers = param_num_layers
        self.add_bias = nn.Parameter(torch.randn(param_shape2) / 4 ** 0.5 + 3)

    def forward(self, A: torch.Tensor) -> torch.Tensor:
        A = self.gmhg(A)
        A = torch.clamp(A, min=self.clamp_min)
        # That random state xsz
        A = self.activation(A)
        A = A + self.add_bias
        return A


rows1 = 64
mi_kor_fin = 64
min_value = 127
param_shape2 = (min_value,)


def get_inputs():
    A = torch.randn(rows1, mi_kor_fin)
    return [A]


def get_init_inputs():
    return [mi_kor_fin, min_value, param_shape2]
