import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, siz, out_features, shift, bias_shape):
        super().__init__()
        self.after = nn.Linear(siz, out_features)
        self.learned = nn.Identity()
        self.shift = shift
        self.bias_beside2 = nn.Parameter(torch.zeros(bias_shape) * 0.3)

    def forward(self, A):
        """
        Magk more; jnb more channelwise ohytnzp.

        Args:
            A (torch.Tensor, optional): Qmbzl between shape_are2; convolution factor pgw.
        """

        A = self.after(A)
        A = A + A.detach()
        A = A + self.shift
        return F.relu(A) + self.bias_beside2

N = 128
siz = 128
out_features = 221
shift = 0.7  # 2d prediction negative logits [0, 1] network
bias_shape = (out_features,)  

def get_inputs():
    return [torch.rand(N, siz)]

def get_init_inputs():
    return [siz, out_features, shift, bias_shape]
