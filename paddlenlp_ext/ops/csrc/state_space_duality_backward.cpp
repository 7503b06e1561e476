// State space duality, backward pass. The forward pass saves only the inputs. A task first recomputes the states before
// all chunks of its documents, and then visits the chunks in reverse. The tasks of a group write the gradients of C and
// B of their own heads; a loop over the positions adds them in the order of the heads.
#include "pooled_array.h"
#include "state_space_duality.h"

namespace plx {
namespace {

using namespace state_space;

// Gradients of C and B [positions, groups, dim], of the heads of one range of each group.
struct GroupGradients {
    float *c, *b;
};

class Task {
  public:
    Task(const StateSpaceSizes& sizes, const StateSpaceTensors& tensors, const HeadRange& heads,
         GroupGradients gradients, Arrays& arrays)
        : sizes_(sizes), tensors_(tensors), heads_(heads), gradients_(gradients), dim_(sizes.state_dim),
          width_(sizes.head_dim), group_(arrays, dim_), chunk_(arrays, width_),
          states_(arrays.take<float>(heads.states_size())), of_states_(arrays.take<float>(heads.states_size())),
          of_root_(arrays.take<float>(heads.states_size())), c_columns_(arrays.take<float>(dim_ * CHUNK)),
          of_c_columns_(arrays.take<float>(dim_ * CHUNK)), of_b_columns_(arrays.take<float>(dim_ * CHUNK)),
          read_columns_(arrays.take<float>(dim_ * CHUNK)), dx_columns_(arrays.take<float>(width_ * CHUNK)),
          of_y_columns_(arrays.take<float>(width_ * CHUNK)), rows_(arrays.take<float>(CHUNK * round_up(dim_))),
          of_p_(arrays.take<float>(CHUNK * CHUNK)), of_cb_(arrays.take<float>(CHUNK * CHUNK)) {}

    // Runs a document without a parent, and the documents that continue it.
    void run(const std::vector<i64>& family) {
        saved_ = scratch<float>(SCRATCH_B, most_chunks(sizes_, family) * heads_.states_size());
        run_backward(
            sizes_, tensors_, heads_, family, {states_, of_states_, of_root_},
            [this](i64 document, i64 chunk) { save_states(document, chunk); },
            [this](i64 document, i64 chunk) { run_reversed(document, chunk); });
    }

  private:
    void load_rows(i64 position, i64 rows) {
        const i64 at = heads_.group_at(position);
        group_.load_rows(tensors_.c + at, tensors_.b + at, heads_.group_stride(), rows);
    }

    // Saves the states before the chunks of a document that starts from states_, as chunk `chunk` and the following.
    void save_states(i64 document, i64 chunk) {
        const i64 end = sizes_.starts[document] + sizes_.lengths[document], size = heads_.state_size();
        for_each_chunk(sizes_, document, [&](i64 position, i64 rows) {
            std::copy_n(states_, heads_.states_size(), saved_ + chunk++ * heads_.states_size());
            if (position + rows == end) return;  // no chunk reads the state after the last one
            load_rows(position, rows);
            for (i64 member = 0; member < heads_.count(); ++member) {
                chunk_.load_vectors(tensors_.decay + heads_.scalar_at(position, member), sizes_.heads, rows);
                chunk_.update(group_, tensors_.dx + heads_.row_at(position, member), heads_.row_stride(),
                              states_ + member * size);
            }
        });
    }

    // Writes the gradients of a document, and replaces of_states_, the gradients of the states after the document, with
    // the gradients of the states before it.
    void run_reversed(i64 document, i64 first_chunk) {
        const i64 start = sizes_.starts[document], length = sizes_.lengths[document];
        for (i64 chunk = num_chunks(length) - 1; chunk >= 0; --chunk) {
            const i64 position = start + chunk * CHUNK, rows = std::min(CHUNK, length - chunk * CHUNK);
            load_rows(position, rows);
            group_.multiply();
            transpose_rows(rows, dim_, group_.c, group_.stride, c_columns_, CHUNK);
            for (float* sums : {of_c_columns_, of_b_columns_}) std::fill_n(sums, dim_ * CHUNK, 0.0f);
            std::fill_n(of_cb_, CHUNK * CHUNK, 0.0f);
            const float* const states = saved_ + (first_chunk + chunk) * heads_.states_size();
            for (i64 member = 0; member < heads_.count(); ++member)
                run_head(position, member, states + member * heads_.state_size());
            write_group_gradients(position);
        }
    }

    void run_head(i64 position, i64 member, const float* state) {
        const i64 rows = group_.rows, stride = heads_.row_stride(), size = heads_.state_size();
        const i64 at = heads_.row_at(position, member), scalar = heads_.scalar_at(position, member);
        const float *const dx = tensors_.dx + at, *const of_y = tensors_.y_gradient + at;
        float *const of_dx = tensors_.dx_gradient + at, *const of_state = of_states_ + member * size;
        chunk_.load_decays(tensors_.decay + scalar, sizes_.heads, rows);
        chunk_.multiply(group_.cb);
        transpose_rows(rows, width_, dx, stride, dx_columns_, CHUNK);
        transpose_rows(rows, width_, of_y, stride, of_y_columns_, CHUNK);
        multiply_to_lower(rows, width_, of_y, stride, dx_columns_, of_p_);

        float of_decay[CHUNK];
        product(false, rows, width_, dim_, Rows{group_.b, group_.stride, 1}, of_state, width_, of_dx, stride);
        float whole = chunk_.whole_decay * dot(state, of_state, size);
        for (i64 row = 0; row < rows; ++row) {
            float* const own = of_dx + row * stride;
            scale(false, chunk_.until_end[row], own, width_, own);
            of_decay[row] = whole;
            whole += dot(dx + row * stride, own, width_);  // gradient of the factor e^(c_C - c)
        }
        multiply_lower_transposed(true, rows, width_, chunk_.p, of_y, stride, of_dx, stride);

        add_to_b(of_state);
        add_to_c(state, of_decay);
        add_pairs(of_decay);
        for (i64 row = 0; row < rows; ++row) tensors_.decay_gradient[scalar + row * sizes_.heads] = of_decay[row];

        for (i64 row = 0; row < rows; ++row)
            scale(false, chunk_.since_start[row], of_y + row * stride, width_, chunk_.scaled + row * width_);
        scale(false, chunk_.whole_decay, of_state, size, of_state);
        product(true, dim_, width_, rows, Rows{group_.c, 1, group_.stride}, chunk_.scaled, width_, of_state, width_);
    }

    // Adds (e^(c_C - c) dx dS1^T)^T to the gradient of B^T.
    void add_to_b(const float* of_state) {
        const i64 columns = round_up(group_.rows);
        for (i64 channel = 0; channel < width_; ++channel)
            for (i64 column = 0; column < columns; column += LANES) {
                float* const own = dx_columns_ + channel * CHUNK + column;
                store(own, load(own) * load(chunk_.until_end + column));
            }
        product(true, dim_, columns, width_, Rows{of_state, width_, 1}, dx_columns_, CHUNK, of_b_columns_, CHUNK);
    }

    // Adds (e^c dY S0^T)^T to the gradient of C^T, and the gradients of the factors e^c to `of_decay`.
    void add_to_c(const float* state, float* of_decay) {
        const i64 rows = group_.rows, columns = round_up(rows);
        product(false, dim_, columns, width_, Rows{state, width_, 1}, of_y_columns_, CHUNK, read_columns_, CHUNK);
        float by_start[CHUNK], later = 0.0f;
        for (i64 column = 0; column < columns; column += LANES) {
            const f32x16 since_start = load(chunk_.since_start + column);
            f32x16 sum{};
            for (i64 at = column; at < dim_ * CHUNK; at += CHUNK) {
                const f32x16 own = since_start * load(read_columns_ + at);
                store(of_c_columns_ + at, load(of_c_columns_ + at) + own);
                sum += own * load(c_columns_ + at);
            }
            store(by_start + column, sum);
        }
        for (i64 row = rows - 1; row >= 0; --row) of_decay[row] += later += by_start[row];
    }

    // Adds dP o D to the gradient of C B^T, and the gradients of D to `of_decay`.
    void add_pairs(float* of_decay) {
        float below[CHUNK] = {};  // sums of dP o P over the rows at and after `row`
        for (i64 row = group_.rows - 1; row >= 0; --row) {
            f32x16 sum{};
            for_each_lower(row, [&](i64 column) {
                const i64 at = row * CHUNK + column;
                const f32x16 of_p = load(of_p_ + at), sums = load(below + column) + of_p * load(chunk_.p + at);
                store(below + column, sums);
                sum += first_lanes(sums, row - column);
                store(of_cb_ + at, load(of_cb_ + at) + of_p * load(chunk_.d + at));
            });
            of_decay[row] += horizontal_sum(sum);
        }
    }

    void write_group_gradients(i64 position) {
        const i64 rows = group_.rows, stride = group_.stride, at = heads_.group_at(position);
        write_rows(of_c_columns_, gradients_.c + at);
        write_rows(of_b_columns_, gradients_.b + at);
        multiply_lower(true, rows, dim_, of_cb_, group_.b, stride, gradients_.c + at, stride);
        multiply_lower_transposed(true, rows, dim_, of_cb_, group_.c, stride, gradients_.b + at, stride);
    }
    void write_rows(const float* columns, float* to) {
        const i64 ld = round_up(dim_);
        transpose_rows(dim_, round_up(group_.rows), columns, CHUNK, rows_, ld);
        for (i64 row = 0; row < group_.rows; ++row) std::copy_n(rows_ + row * ld, dim_, to + row * group_.stride);
    }

    const StateSpaceSizes& sizes_;
    const StateSpaceTensors& tensors_;
    const HeadRange heads_;
    const GroupGradients gradients_;
    const i64 dim_, width_;
    GroupChunk group_;
    HeadChunk chunk_;
    float* saved_ = nullptr;                                   // states before the chunks
    float *const states_, *const of_states_, *const of_root_;  // [heads of the range, dim, width]
    float *const c_columns_, *const of_c_columns_, *const of_b_columns_, *const read_columns_;  // [dim, 64]
    float *const dx_columns_, *const of_y_columns_;                                             // [width, 64]
    float* const rows_;                                                                         // [64, dim]
    float *const of_p_, *const of_cb_;                                                          // [64, 64]
};

i64 num_positions(const StateSpaceSizes& sizes) {
    i64 count = 0;
    for (i64 document = 0; document < sizes.documents; ++document)
        count = std::max(count, sizes.starts[document] + sizes.lengths[document]);
    return count;
}

}  // namespace

Status state_space_duality_backward(const StateSpaceSizes* sizes, const StateSpaceTensors* tensors) {
    return guarded([&] {
        const i64 per_group = HeadRange::per_group(*sizes);
        const i64 size = num_positions(*sizes) * sizes->groups * sizes->state_dim;
        const PooledArray<float> others(2 * (per_group - 1) * size);  // gradients of all ranges except the first
        auto gradients = [&](i64 index) -> GroupGradients {
            if (index == 0) return {tensors->c_gradient, tensors->b_gradient};
            float* const own = others.data() + 2 * (index - 1) * size;
            return {own, own + size};
        };
        run_tasks(*sizes, sizes->groups * per_group, [&](i64 range, Arrays& arrays) {
            const HeadRange heads(*sizes, range);
            return Task(*sizes, *tensors, heads, gradients(heads.index_in_group()), arrays);
        });
        parallel_for_vectors(per_group > 1 ? size : 0, [&](i64 at, i64 count) {
            f32x16 c{}, b{};
            for (i64 index = 0; index < per_group; ++index) {
                c += load_part(gradients(index).c + at, count);
                b += load_part(gradients(index).b + at, count);
            }
            store_part(tensors->c_gradient + at, c, count);
            store_part(tensors->b_gradient + at, b, count);
        });
    });
}

}  // namespace plx
