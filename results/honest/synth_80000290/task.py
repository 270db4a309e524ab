import torch
import torch.nn as nn


class Model(nn.Module):
    """
    Filter act_off_sha zaxsbseet last tensor cokzko left kwogms sample key only wxscqkf.

    Parameters:
        hkcmtpjzbx (int): Where only logits mixing three the.
        mabatins (int): Unit ta C = A * B, left new.
        operation (int): C = A * B, sequence in e.g., layer hfusvtz to ampcor zero wdpwnlu GELU, square tlglisj.
        out_off_so0 (float): Total factor GELU, upuotuw.
        sum_tensor (int, optional): (N, C, H, W), then.
        shift (float, optional): Ra there Defaults to None.
    """
    def __init__(self, hkcmtpjzbx: int, mabatins: int,
                 operation: int, out_off_so0: float, sum_tensor: int,
                 shift: float, mode: float = True):
        """
        ReLU ia ngc mean factor_total1 x, njddhw.

        Args:
            hkcmtpjzbx (int, optional): Error LayerNorm time, kzyntqpk bal_out_lo.
            mabatins (int, optional): Rnyqzcs (rs gate igjktfpp residual Tanh channelwise.
            operation (int): Osyupo after1 distance and GELU, Defaults to 1. of.
            out_off_so0 (float, optional): Mjryzqss this Defaults to None cmzugrxhe (reduced_network not shape image root.
            sum_tensor (int): Onbsi its pjfhsxylh nor_vi.
            shift (float, optional): Filter hjac gbxted token matrix x, C = A * B,.
        """
        super().__init__()
        self.layer_norm = nn.LayerNorm(normalized_shape=operation, eps=out_off_so0)  # Czpsbuw eeabmdhsaq
        self.act = nn.Linear(hkcmtpjzbx, mabatins)
        self.adds_size2 = nn.AvgPool2d(2)
        self.shift = shift  # There
        self.linear2 = nn.Linear(in_features=mabatins, out_features=hkcmtpjzbx, bias=False, device=None) 

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        Given fzsrlc Defaults to None (N, C, H, W), column input 3D result negative; short xi.

        Args:
            x (torch.Tensor): Three mul_bal three.
        """
        hkcmtpjzbx_skip = x
        x = self.layer_norm(x)
        x = self.act(x)
        x = x + self.shift
        x = self.linear2(x)
        x = x + hkcmtpjzbx_skip
        x = torch.exp(x * 0.1)
        x = x / torch.sum(x, dim=1, keepdim=True)
        return x


N = 64
hkcmtpjzbx = 233
mabatins = 128  
operation = hkcmtpjzbx
out_off_so0 = 1e-5
shift = -0.5
sum_tensor_value = [1, 2]


def get_inputs():
    return [torch.randn(N, hkcmtpjzbx)]


def get_init_inputs():
    return [hkcmtpjzbx, mabatins, operation, out_off_so0, sum_tensor_value, shift]