// What the ranks of one host exchange through a segment of shared memory: rounds of a group and streams of
// bytes.
//
// Every wait spins for some microseconds and then sleeps in a futex. A poisoned segment ends all of them.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "linear.h"

namespace radix {

struct RankLost : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A count modulo 2^31 that one rank advances and others wait for. The top bit is set when the segment is
// poisoned.
struct alignas(64) Flag {
    std::atomic<uint32_t> value, sleepers;
};

class Segment {
  public:
    static constexpr size_t HEADER = 4096;  // then the flags
    Segment(int fd, size_t bytes, int num_flags, double spin_us);
    ~Segment();
    void poison(const std::string& reason);  // wakes every waiter; the first reason stands
    std::string reason() const;              // empty while nothing is wrong
    // Until `flag` has come to `count`. False: lost, or with rank -1, not come in time.
    bool wait(Flag& flag, uint32_t count, double timeout_s, int rank);
    void advance(Flag& flag, uint32_t by);  // of the one rank that owns the flag
    Flag* flag(int i) const { return (Flag*)(base + HEADER) + i; }
    char* at(size_t offset) const { return base + offset; }
    double take_waited_s();  // seconds that this process waited since the last call
    bool lost() const { return is_lost.load(std::memory_order_acquire); }
    void check() const;  // throws RankLost

  private:
    char* base;
    size_t bytes;
    int num_flags;
    double spin_s;
    std::atomic<int64_t> waited_ns{0};
    std::atomic<bool> is_lost{false};
    std::mutex once;
    std::string failure;
    void fail(const std::string& why);
};

// Ranks that gather parts of a tensor, as a step program does between its kernels.
class RankGroup {
  public:
    RankGroup(int rank, int size) : rank(rank), size(size) {}
    virtual ~RankGroup() = default;
    // Row i of y [rows, ldy] gets the bytes bounds[r] .. bounds[r + 1] from rank r, whose own are row i of x.
    // `target`: the only rank that gets them, or -1. x may lie in y. ldx and ldy are bytes. A whole team
    // calls it; it never throws.
    virtual void gather(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows,
                        const int64_t* bounds, int target) = 0;
    virtual void check() = 0;  // throws what has gone wrong
    const int rank, size;
    // Memory that all ranks of the group write and read, and what keeps them in step there. A whole team
    // calls `barrier`; it never throws.
    struct Common {
        char* memory = nullptr;
        size_t bytes = 0;
    };
    virtual Common common() const { return {}; }
    virtual void barrier(const Ctx&) {}
};

// Ranks of several hosts, whose messages Python sends.
class CalledGroup : public RankGroup {
  public:
    using Call = std::function<void(Address x, int64_t ldx, Address y, int64_t ldy, int64_t rows,
                                    const std::vector<int64_t>& bounds, int target)>;
    CalledGroup(int rank, int size, Call call) : RankGroup(rank, size), call(std::move(call)) {}
    void gather(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows,
                const int64_t* bounds, int target) override;
    void check() override;

  private:
    Call call;
    std::exception_ptr failure;
};

// Ranks that exchange pieces in rounds. A piece lies in its rank's slot, of which there are two in turn: who
// has come to round s has read all of round s - 1. All ranks make the same calls in the same order; a team of
// threads may make one together. After a loss the calls do nothing and `Segment::check` throws.
class ShmGroup : public RankGroup {
  public:
    // `ranks`: how messages name them. A flag for each from first_flag on, two slots for each from `offset`
    // on; then `common_bytes` of memory for all.
    ShmGroup(Segment& segment, int rank, std::vector<int> ranks, int first_flag, size_t offset,
             size_t slot_bytes, size_t common_bytes, double timeout_s);
    void gather(const Ctx& ctx, const char* x, int64_t ldx, char* y, int64_t ldy, int64_t rows,
                const int64_t* bounds, int target) override;
    void check() override { segment.check(); }
    void all_reduce(const Ctx& ctx, const float* x, float* y, int64_t count);  // adds in rank order
    // x has the bytes for rank 0, then for rank 1, ...; y gets those from rank 0, then from rank 1, ...
    void all_to_all(const char* x, const std::vector<int64_t>& send, char* y,
                    const std::vector<int64_t>& receive);
    Common common() const override;
    void barrier(const Ctx& ctx) override;
    void barrier();  // of one thread
    Segment& segment;

  private:
    std::vector<int> ranks;
    Flag* flags;
    size_t offset, slot_bytes, common_bytes;
    double timeout_s;
    uint32_t round;
    bool stands = false;  // nothing is lost yet, as the whole team sees it
    char* slot(int r) const { return segment.at(offset + (size_t(r) * 2 + (round & 1)) * slot_bytes); }
    bool begin();                // the own slot may be written
    bool publish(bool waiting);  // it has been; wait for the others'
    template <class Write, class Read>
    void exchange(const Ctx& ctx, bool reads, Write&& write, Read&& read);
};

// Bytes from one writer to n readers through a ring, in units of 64 bytes. Longer ones flow through in parts.
class Stream {
  public:
    // Flags: head, then each reader's tail. `reader`: -1 for the writer. `ranks`: the writer, then the
    // readers, as messages name them. `bytes`: a power of two.
    Stream(Segment& segment, int reader, std::vector<int> ranks, int first_flag, size_t offset, size_t bytes);
    void write(const char* data, size_t count, double timeout_s);
    void read(char* data, size_t count, double timeout_s);
    bool poll(double timeout_s);  // whether there is something to read
    Segment& segment;

  private:
    int reader;
    std::vector<int> ranks;
    Flag* flags;
    char* ring;
    uint32_t units, at;
};

}  // namespace radix
