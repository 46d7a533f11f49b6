// Ops of a program around recurrences, gates and norms of heads.
#include <stdexcept>

#include "program_call.h"

namespace radix {

void Program::gate(int x, int y, int heads, int head_dim, int64_t offset, int stride, bool selected, int act,
                   bool one_each) {
    Op& op = push(GATE);
    op.x = x, op.y = y, op.x_offset = offset, op.selected = selected;
    GateArgs& a = op.gate;
    a.heads = heads, a.width = head_dim, a.stride = stride, a.act = act, a.one_each = one_each;
}
void Program::grow_rows(int y, Address factors, int heads, int head_dim, int stride) {
    Op& op = push(MIX);
    op.y = y, op.factors = at<float>(factors), op.mix.mode = 5;
    op.mix.head = head_dim, op.mix.head_stride = stride, op.mix.dim = int64_t(heads) * head_dim;
}
void Program::scale(int y, int64_t offset, int64_t dim, float scale, float cap, bool sigmoid, bool selected) {
    Op& op = push(MIX);
    op.y = y, op.y_offset = offset, op.selected = selected;
    op.mix.mode = sigmoid ? 7 : 6, op.mix.dim = dim, op.mix.x_scale = scale, op.mix.cap = cap;
}
void Program::head_norm(int x, int y, std::tuple<int64_t, int64_t, int64_t> offsets, int gate,
                        std::tuple<int64_t, int64_t> heads, Address weight, bool own_weights,
                        std::tuple<float, float, bool> of, int act, bool gates_last) {
    Op& op = push(HEAD_NORM);
    op.x = x, op.y = y, op.q = gate;
    op.x_offset = std::get<0>(offsets), op.y_offset = std::get<1>(offsets),
    op.offsets[0] = std::get<2>(offsets);
    HeadNormArgs& a = op.head_norm;
    a.heads = std::get<0>(heads), a.width = std::get<1>(heads), a.weight = at<float>(weight),
    a.own_weights = own_weights;
    a.eps = std::get<0>(of), a.scale = std::get<1>(of), a.is_sum = std::get<2>(of), a.act = act,
    a.gates_last = gates_last;
}
void Program::conv(int x, int y, std::array<int64_t, 3> offsets, std::array<int64_t, 3> shape, Address weight,
                   Address bias, Address state) {
    if (shape[1] < 1 || shape[1] > MOST_CONV) throw std::invalid_argument("a convolution is too wide");
    Op& op = push(CONV);
    op.x = x, op.y = y;
    for (int i = 0; i < 3; i++) op.offsets[i] = offsets[size_t(i)];
    ConvArgs& a = op.conv;
    a.channels = shape[0], a.width = int(shape[1]), a.act = int(shape[2]);
    a.weight = at<float>(weight), a.bias = at<float>(bias), a.state = at<float>(state);
}
void Program::decay(int x, int64_t offset, int step, int log, int64_t dim, Address bias, Address rate,
                    std::array<float, 3> limits, bool is_factor) {
    Op& op = push(DECAY);
    op.x = x, op.x_offset = offset, op.q = step, op.y = log;
    DecayArgs& a = op.decay;
    a.dim = dim, a.bias = at<float>(bias), a.rate = at<float>(rate);
    a.low = limits[0], a.high = limits[1], a.floor = limits[2], a.is_factor = is_factor;
}
void Program::scan(std::vector<std::tuple<int, int64_t, int64_t>> inputs, int y, std::array<int64_t, 6> shape,
                   Address a, Address skip, Address state) {
    Op& op = push(SCAN);
    op.y = y;
    ScanArgs& s = op.scan;
    ScanInput* to[] = {&s.q, &s.k, &s.v, &s.decay, &s.beta};
    for (size_t i = 0; i < inputs.size() && i < 5; i++) {
        const auto& [buffer, offset, head] = inputs[i];
        op.from[i] = buffer, op.at[i] = offset, to[i]->head = head;
    }
    s.kind = int(shape[0]), s.heads = shape[1], s.keys = shape[2], s.values = shape[3],
    s.decays = int(shape[4]), s.repeats = shape[5];
    s.a = at<float>(a), s.skip = at<float>(skip), s.state = at<float>(state),
    s.page = s.heads * s.keys * s.values;
}

void Program::bind_state(Op& op, const Call& c, int64_t n) {
    auto data = [&](int b, int64_t offset) { return b < 0 ? nullptr : buffers[size_t(b)].data + offset; };
    auto stride = [&](int b) { return b < 0 ? 0 : buffers[size_t(b)].stride; };
    float *x = data(op.x, op.x_offset), *y = data(op.y, op.y_offset);
    const int64_t ldx = stride(op.x), ldy = stride(op.y);
    switch (op.kind) {
        case GATE:
            op.gate.x = x, op.gate.ldx = ldx, op.gate.y = y, op.gate.ldy = ldy, op.gate.rows = n;
            break;
        case HEAD_NORM: {
            HeadNormArgs& a = op.head_norm;
            a.x = x, a.ldx = ldx, a.y = y, a.ldy = ldy, a.gate = data(op.q, op.offsets[0]),
            a.ldg = stride(op.q), a.rows = n;
            break;
        }
        case CONV: {
            ConvArgs& a = op.conv;
            a.x = data(op.x, op.offsets[0]), a.ldx = ldx, a.y = y, a.ldy = ldy;
            a.times = op.offsets[1] < 0 ? nullptr : data(op.x, op.offsets[1]),
            a.gate = op.offsets[2] < 0 ? nullptr : data(op.x, op.offsets[2]);
            a.runs = at<StateRun>(c.runs), a.num_runs = c.num_runs;
            break;
        }
        case DECAY: {
            DecayArgs& a = op.decay;
            a.x = x, a.ldx = ldx, a.step = data(op.q, 0), a.lds = stride(op.q), a.log = y, a.ldl = ldy,
            a.rows = n;
            break;
        }
        default: {
            ScanArgs& s = op.scan;
            ScanInput* to[] = {&s.q, &s.k, &s.v, &s.decay, &s.beta};
            for (int i = 0; i < 5; i++)
                to[i]->data = data(op.from[i], op.at[i]), to[i]->token = stride(op.from[i]);
            s.out = y, s.out_token = ldy, s.tokens = n, s.runs = at<StateRun>(c.runs),
            s.num_runs = c.num_runs;
        }
    }
}

}  // namespace radix
