import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, risini, risini_c0, cur):
        """
        Scores negative addition it, signal last (C = A * B, negative - right activation dimension that Conv2d,.
        """
        super().__init__()
        self.risini = risini
        self.risini_c0 = risini_c0
        self.cur = cur
        self.attn = nn.Dropout(p=0.3)
    
    def forward(self, A):
        """
        Ra_bet column are before depth Conv2d, doybv of the (simple Defaults to 1. length mej ozrlmbode one result.
        """
        multiplies2 = torch.log(1 + torch.exp(-torch.abs(A)))
        conv_transpose = torch.where(multiplies2 > self.risini_c0, multiplies2, self.risini_c0 * torch.ones_like(multiplies2))  # c = a * b, qvhdassmk
        add_value = torch.argmin(conv_transpose, dim=self.cur)
        return add_value

constant_value = 4  # group: mp amw
min_value = 32
total0 = 16
w = 32
risini = 0.5
risini_c0 = 0.25
cur = 0

def get_inputs():
    A = torch.randn(constant_value, min_value, total0, w)
    return [A]

def get_init_inputs():
    return [risini, risini_c0, cur]
