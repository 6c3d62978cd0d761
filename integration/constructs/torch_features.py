"""torch: modules, hooks, autograd functions, optimizers, function transforms."""

import numpy as np
import torch
from torch import nn
from torch._higher_order_ops import associative_scan, scan, while_loop
from torch._higher_order_ops import map as map_rows
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from constructs import case


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])
        self.norm = nn.LayerNorm(3)
        self.calls = 0
        self.register_buffer("steps", torch.zeros(1))
        for p in self.parameters():
            nn.init.constant_(p, 0.5)

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.norm(x)


def net_and_tensor():
    return Net(), torch.arange(6.0).reshape(2, 3)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 * x


@case(inputs=net_and_tensor)
def module_call(net, x):
    return net(x), net.calls, net.steps + 0


@case(inputs=net_and_tensor)
def module_iteration(net, x):
    names = [name for name, _ in net.named_parameters()]
    total = sum(p.sum() for p in net.parameters())
    return x + total, names, [type(m).__name__ for m in net.children()], len(net.layers)


@case(inputs=net_and_tensor)
def train_and_eval(net, x):
    net.eval()
    before = net.training
    net.train()
    return net(x), before, net.training


@case(inputs=net_and_tensor)
def state_dict(net, x):
    return x + 1, sorted(net.state_dict())


@case
def module_made_inside(x):
    layer = nn.Linear(3, 3)
    nn.init.ones_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer(x)


@case(inputs=net_and_tensor)
def forward_hook(net, x):
    handle = net.norm.register_forward_hook(lambda m, args, out: out * 2)
    y = net(x)
    handle.remove()
    return y


@case
def autograd_function(x):
    return Square.apply(x) + 1


@case
def functional_ops(x):
    return F.softmax(x, -1), F.gelu(x), F.pad(x, (1, 1)), F.one_hot(torch.tensor([1, 0]), 3)


@case
def views_and_in_place(x):
    y = x.clone()
    y[0] = 9
    y[:, 1] += 5
    y.view(-1)[2] = -1
    y.mul_(2)
    return y, y.t().contiguous(), torch.cat([y, x]), torch.stack([x, y]).sum(0)


@case
def out_argument(x):
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    return out


@case
def no_grad_and_detach(x):
    w = x.clone().requires_grad_()
    with torch.no_grad():
        y = w * 2
    z = (w * 3).detach()
    return y, y.requires_grad, z.requires_grad, (w * 3).requires_grad


class Doubled(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.sin else result


@case
def function_mode(x):
    with Doubled() as mode:
        y = torch.sin(x) + x.shape[0]
    return y, torch.sin(x), mode.seen


@case
def function_modes_in_each_other(x):
    with Doubled() as outer, Doubled() as inner:
        y = torch.sin(x) + torch.ones(3)
    return y, outer.seen, inner.seen


class Unit(torch.Tensor):
    """A quantity whose unit goes from operands to results."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        if type(result) is cls:
            units = [one.unit for one in args if isinstance(one, cls)]
            result.unit = "*".join(units) if func is torch.Tensor.mul else units[0]
        return result

    def in_unit(self, unit):
        result = self.as_subclass(torch.Tensor).as_subclass(Unit)
        result.unit = unit
        return result


class Logged(torch.Tensor):
    """Writes down what is called, and gives up its class."""

    calls = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(func.__name__)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@case
def tensor_subclass(x):
    length = x.as_subclass(Unit).in_unit("m")
    area = length * length[0]
    return area.unit, type(area).__name__, (-area).unit, area.as_subclass(torch.Tensor) + 1


@case
def tensor_subclass_with_effects(x):
    Logged.calls.clear()
    y = torch.cat([x.as_subclass(Logged), x]).sum(0)
    z = F.relu(x.as_subclass(Logged) - 1)
    return y, z, type(z).__name__, list(Logged.calls)


@case(inputs=lambda: (torch.arange(3.0).requires_grad_().as_subclass(Unit),))
def tensor_subclass_from_outside(x):
    x.unit = "s"
    y = torch.sin(x) * x
    return y.unit, y.shape, y.sum().as_subclass(torch.Tensor), x.unit


class Sized(nn.Parameter):
    @property
    def width(self):
        return self.shape[-1] * self.factor


def layer_with_special_tensors():
    layer = nn.Module()
    layer.weight, layer.shift = Sized(torch.ones(3)), nn.Buffer(torch.ones(3))
    layer.weight.factor = 2
    return layer, torch.arange(3.0)


@case(inputs=layer_with_special_tensors)
def parameter_property_and_buffer(layer, x):
    kinds = [isinstance(one, nn.Buffer) for one in (layer.weight, layer.shift, x)]
    return x * layer.weight.width + layer.shift, kinds


@case
def function_mode_and_device(x):
    with torch.device("meta"), Doubled() as mode:
        where = torch.ones(3).device.type
        y = torch.sin(x)
    return y + torch.ones(3), where, mode.seen, torch.get_default_device()


@case
def inference_mode(x):
    with torch.inference_mode():
        y = x + 1
    return y * 1 if not y.is_inference() else y.is_inference()


@case
def autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.T
    return y


@case
def item_and_tolist(x):
    return x.sum().item() + 1, x[0].tolist()


@case
def nonzero_and_mask(x):
    return x[x > 2], torch.nonzero(x)


@case(inputs=lambda: (torch.ones(3, requires_grad=True),))
def backward_inside(w):
    w.grad = None
    (w * 3).sum().backward()
    return w.grad


@case(inputs=lambda: (torch.ones(3, requires_grad=True),))
def autograd_grad_inside(w):
    (g,) = torch.autograd.grad((w * w).sum(), w)
    return g + 1


@case
def func_grad_and_vmap(x):
    g = torch.func.grad(lambda t: (t * t).sum())(x)
    v = torch.func.vmap(lambda row: row.sum() * row)(x)
    return g, v


@case
def func_jvp_and_jacrev(x):
    _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
    return tangent, torch.func.jacrev(lambda t: t.sum(0))(x).shape


@case(inputs=net_and_tensor)
def functional_call(net, x):
    params = {k: v * 2 for k, v in net.named_parameters()}
    return torch.func.functional_call(net, params, (x,))


@case(inputs=net_and_tensor)
def optimizer_step(net, x):
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    opt.step()
    return x + net.norm.weight


@case
def checkpoint(x):
    from torch.utils.checkpoint import checkpoint as run

    return run(lambda t: t.sin().cos(), x, use_reentrant=False)


@case(inputs=lambda: (nn.LSTM(3, 4), torch.ones(2, 3)))
def lstm(net, x):
    for p in net.parameters():
        nn.init.constant_(p, 0.1)
    out, (h, c) = net(x)
    return out.sum() + h.sum() + c.sum()


@case
def tensor_attributes(x):
    return (
        x + 1,
        x.ndim,
        x.is_contiguous(),
        x.stride(),
        x.numel(),
        x.T.shape,
        x.requires_grad,
        x.device,
        x.layout,
    )


@case
def tensor_constructors(x):
    return (
        x + torch.tensor([1, 2, 3]),
        torch.zeros(2),
        torch.full((2,), 3.0),
        torch.arange(4),
        x.new_ones(2),
        torch.eye(2),
    )


@case
def sort_topk_unbind(x):
    values, indices = x.sort(descending=True)
    top = x.topk(2)
    return (
        values,
        indices,
        top.values,
        x.max(dim=1).indices,
        [r + 1 for r in x.unbind()],
        x.split(2, 1),
    )


@case
def einsum_and_matmul(x):
    return torch.einsum("ij,kj->ik", x, x), x @ x.T, torch.bmm(x[None], x.T[None])


@case
def custom_module_attributes(x):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.ones(3) * 2)

        def forward(self, t):
            return t * self.k

    return Scale()(x)


@case
def tensor_hook(x):
    w = x.clone().requires_grad_()
    w.register_hook(lambda g: g * 2)
    return (w * 2).sum()


@case
def torch_device_context(x):
    with torch.device("cpu"):
        return x + torch.ones(3)


@case
def tree_map(x):
    from torch.utils import _pytree

    return _pytree.tree_map(lambda t: t + 1, {"a": x, "b": [x, (x,)]})


@case
def data_attribute(x):
    w = x.clone()
    w.data = x * 3
    return w + 1


@case
def numpy_round_trip(x):
    np = __import__("numpy")
    return torch.from_numpy(np.add(x.numpy(), 1))


@case
def cond_on_a_tensor(x):
    return torch.cond(x.sum() > 0, lambda y: {"r": y.sin()}, lambda y: {"r": y.cos()}, (x,))["r"]


@case
def cond_with_closures(x):
    z = x * 2
    first = torch.cond(x.sum() < 0, lambda: z + x, lambda: z - x, ())
    return torch.cond((first > 0).all(), lambda y: y * z, lambda y: y / 2, (first,)) + 1


@case
def while_loop_on_a_tensor(x):
    def body(i, y):
        return i + 1, y * 0.5 + i

    return while_loop(lambda i, y: (i < 4) & (y.sum() > -100), body, (torch.tensor(0), x))


@case
def map_over_rows(x):
    return map_rows(lambda row, k: (row.sin(), {"s": row.sum() * k}), x, torch.tensor(2.0))


@case
def scan_over_rows(x):
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(x.shape[1:]), x)


@case
def associative_scan_over_rows(x):
    return associative_scan(torch.add, x, 0, combine_mode="generic")


@torch.autocast("cpu", dtype=torch.bfloat16)
def narrow(x):
    return x @ x.T


@case
def autocast_decorator(x):
    return narrow(x).float(), x @ x.T


@case
def attention_backend(x):
    q = x.reshape(1, 1, *x.shape)
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


class Weight(nn.Parameter):
    gain = 2.0

    def scaled(self):
        return self * self.gain


@case(inputs=lambda: (torch.ones(2, 3), Weight(torch.arange(9.0).reshape(3, 3))))
def parameter_subclass(x, w):
    return x @ w.scaled(), type(w).__name__, isinstance(w, nn.Parameter), type(w + 1).__name__


@case(inputs=lambda: (nn.MultiheadAttention(4, 2, batch_first=True).eval(), torch.ones(2, 3, 4)))
def attention_in_eval(layer, x):
    for p in layer.parameters():
        nn.init.constant_(p, 0.1)
    with torch.no_grad():
        mask = torch.tensor([[False, False, True], [False, False, False]])
        return layer(x, x, x, need_weights=False), layer(x, x, x, key_padding_mask=mask)


@case(inputs=lambda: (torch.tensor([1.5, 0.0, -2.5]),))
def types_of_python_as_dtypes(x):
    made = torch.zeros(3, dtype=int) + torch.full((3,), 1, dtype=complex)
    return made, x.to(int), x.sum(dtype=float), x.to(bool) | (x > 0), x.double().view(int)


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, config):
        ctx.scale = config["scale"]
        return x * ctx.scale + config["shift"][0]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.scale, None


SCALES = {"scale": 3, "shift": [1.5]}


@case(inputs=lambda: (torch.arange(3.0, requires_grad=True),))
def function_of_an_outside_dict(x):
    return Scale.apply(x, SCALES).sin()


def net_of_its_own():
    return nn.Linear(3, 3), torch.arange(6.0).reshape(2, 3)


@case(inputs=net_of_its_own)
def parameter_taken_out_and_put_back(net, x):
    weight = net.weight
    del net._parameters["weight"]
    net.weight = weight.detach() * 2
    y = net(x)
    del net.weight
    net.weight = weight
    return y.shape, "weight" in vars(net), net.weight is weight


@case(inputs=lambda: (torch.arange(6.0).reshape(2, 3), torch.empty(0), torch.empty(4)))
def tensors_from_outside_that_grow(x, out, other):
    y = x + 1
    torch.add(y, 1, out=out)
    other.resize_(3)
    other.fill_(2.0)
    return y, out * 2, other


@case(inputs=lambda: (torch.arange(24.0).reshape(4, 6), torch.arange(12.0).reshape(2, 6)))
def operators_that_write_their_first_operand(x, other):
    out = []
    for one in (x, other):  # of other sizes
        square, left, right = torch.ones(len(one), len(one)), one[:, :3], one[:, 3:]
        torch.addmm(square, one, one.mT, beta=0.5, out=square)
        torch.cumsum(one, 1, out=one)
        left.add_(right)
        out += [square, one * 1]
    return out


@case(inputs=lambda: (torch.ones(1, 4), [torch.ones(1)]))
def types_that_torch_asks_for(x, rows):
    asked = [torch.jit.isinstance(x, torch.Tensor), torch.jit.isinstance(rows, list[torch.Tensor])]
    return F.max_pool1d(x, 2), asked, x.type(torch.DoubleTensor), x.type(torch.FloatTensor) is x


@case(inputs=lambda: (torch.tensor([0.5, 2.0]),))
def draws_of_distributions(x):
    torch.manual_seed(0)
    beta = torch.distributions.Beta(x, x, validate_args=False).rsample()
    few = torch.distributions.Binomial(4, x / 4, validate_args=False).sample()
    return beta, few, torch.distributions.Gamma(x, x, validate_args=False).rsample()


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@case
def function_that_writes_to_its_argument(x):
    y = x + 1
    z = DoubledInPlace.apply(y)
    return z is y, z, y * 2


@case
def added_to_itself_by_index(x):
    y = x + 1
    try:
        y.index_add_(0, torch.tensor([0, 1]), y)
    except RuntimeError:
        return y, "refused"
    return y


@case
def what_old_tensor_types_and_divmod_say(x):
    y = x + 1
    try:
        divmod(y, 2)
    except TypeError as error:
        return str(error), isinstance(y, torch.FloatTensor), isinstance(y, torch.LongTensor)


@case
def write_through_unfold(x):
    y = x.clone()
    windows = y.unfold(1, 2, 2)  # which do not reach the last column
    windows.add_(1)
    return y, windows


@case
def numbers_that_real_operators_refuse(x):
    def said(function, *args):
        try:
            return function(*args)
        except Exception as error:
            return type(error).__name__, str(error)

    half, small = x.half(), torch.ones(3, dtype=torch.int8)
    return (
        said(torch.full, (2,), 1e40),
        said(x.clone().fill_, 1e300),
        said(x.clamp, None, 1e40),
        said(half.masked_fill, half > 0, 70000.0),
        said(F.pad, half, (1, 1), "constant", 1e5),
        said(small.clone().mul_, 1.5),
        said(small.__lt__, 2**40),
        said(small.clone().add_, 1 + 2j),
        said(F.leaky_relu, small),
        said(x.__and__, 3),
        x + 1e40,
    )


@case(inputs=lambda: (torch.ones(2, 3), Weight(torch.ones(3)), torch.ones(2).double()))
def classes_of_one_dtype(x, w, d):
    kinds = (torch.FloatTensor, torch.LongTensor, torch.cuda.FloatTensor, torch.sparse.FloatTensor)
    tensors = (x, w, d, x.long(), x.new_zeros(1), x.detach(), x.to("meta"), 3, [x])
    found = [[isinstance(value, kind) for kind in kinds] for value in tensors]
    either = isinstance(x, (int, torch.DoubleTensor)), isinstance(d, (int, torch.DoubleTensor))
    below = issubclass(torch.Tensor, kinds), issubclass(torch.FloatTensor, torch.FloatTensor)
    return x * 2, found, either, below


@case(inputs=lambda: (torch.ones(2), 3, np.array([1.5, 2.0])))
def tensors_made_by_their_class(x, n, array):
    made = torch.Tensor([1, n]), torch.LongTensor((1.5, True)), torch.BoolTensor([[n], [0]])
    filled = torch.Tensor(x.shape[0], 3).fill_(n), torch.DoubleTensor(), torch.FloatTensor(n).shape
    return x + torch.FloatTensor(array), torch.LongTensor(array), made, filled


@case
def numbers_bound_the_elements_of_many(x):
    tensors = [x.clone(), x * -2]
    above, below = (
        torch._foreach_maximum(tensors, 1.5),
        torch._foreach_minimum(tensors, [0.5, -3.0]),
    )
    torch._foreach_maximum_(tensors, 2)
    return above, below, tensors, torch._foreach_maximum(tensors, [x, x + 9])
