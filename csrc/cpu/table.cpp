// The kernels of one instruction set.
#include "../common/api.h"
#include "int8.h"

#define RADIX_STRING2(x) #x
#define RADIX_STRING(x) RADIX_STRING2(x)

namespace radix {
namespace RADIX_ISA {
void linear(const LinearArgs&, const Ctx&);
size_t linear_shared(const LinearArgs&);
size_t linear_local(const LinearArgs&, int);
void norm(const NormArgs&, const Ctx&);
void store(const StoreArgs&, const Ctx&);
void attention(const AttnArgs&, const Ctx&);
size_t attention_local(const AttnArgs&);
void activation(const ActArgs&, const Ctx&);
void mix(const MixArgs&, const Ctx&);
void embed(const EmbedArgs&, const Ctx&);
void pack(const PackArgs&, const Ctx&);
void scan(const ScanArgs&, const Ctx&);
void conv(const ConvArgs&, const Ctx&);
void decay(const DecayArgs&, const Ctx&);
void head_norm(const HeadNormArgs&, const Ctx&);
void gate(const GateArgs&, const Ctx&);
void lora_shrink(const LoraArgs&, const Ctx&);
void lora_expand(const LoraArgs&, const Ctx&);
size_t lora_local(int64_t);
void sample(const SampleArgs&, const Ctx&);
size_t sample_local(const SampleArgs&);
double ceiling(int, const float*, size_t, float*);
void sparse_attention(const SparseArgs&, const Ctx&);
size_t sparse_shared(const SparseArgs&);
size_t sparse_local(const SparseArgs&);

extern const Kernels table;
const Kernels table = {
    RADIX_STRING(RADIX_ISA),
    {linear_int8, linear_int8_shared, linear_int8_local, int8_ceiling, attention_int4, attention_int4_local},
    linear,
    linear_shared,
    linear_local,
    norm,
    store,
    attention,
    attention_local,
    activation,
    mix,
    embed,
    pack,
    scan,
    conv,
    decay,
    head_norm,
    gate,
    lora_shrink,
    lora_expand,
    lora_local,
    sample,
    sample_local,
    ceiling,
    sparse_attention,
    sparse_shared,
    sparse_local};
}  // namespace RADIX_ISA
}  // namespace radix
