import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, in_channels, pe_ra, kernel_size, num_heads, embedding):
        super(Model, self).__init__()
        self.gwsy = nn.Conv2d(in_channels, pe_ra, kernel_size)
        self.extra = nn.Linear(in_features=4, out_features=8, bias=False)
        self.embedding = embedding 
    
    def forward(self, x):
        """
        And (is oxveetaxz height; GEMM from e.g., ywmsoqoat on embedding one el (Tanh.
        """
        x = self.gwsy(x)
        x = torch.sum(x, dim=(2, 3), keepdim=True)
        x = x / 2
        return x - self.embedding

multiply_value = 4
in_channels = 4
pe_ra = 32
kernel_size = 5
pe_H = 24  # running c = a * b, only
w = 24
embedding = 1.034334226113952  
num_heads_value = 1e-5

def get_inputs():
    x = torch.randn(multiply_value, in_channels, pe_H, w)
    return [x]

def get_init_inputs():
    return [in_channels, pe_ra, kernel_size, num_heads_value, embedding]
