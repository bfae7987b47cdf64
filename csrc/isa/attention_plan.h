// A step of attention cut into tasks of about equal work.

// Query tokens of one row, some KV heads, some partitions. With `partial` >= 0 each partition's state goes to that place of
// the shared buffer and is folded afterwards; else the task folds and writes the output itself.
struct AttentionTask {
    int row, token, tokens, head, heads;
    int64_t part_begin, part_end, partial;
};

struct KeyRange { int64_t begin, end; };

// The keys that a query sees; begin == end: none.
INLINE KeyRange key_range(const AttentionArgs& args, int row, int64_t token) {
    const int64_t position = args.positions[token];
    int64_t begin = args.window ? greater<int64_t>(0, position - args.window + 1) : 0;
    int64_t end = lesser<int64_t>(position + 1, args.context_lens[row]);
    if (args.key_start) begin = greater<int64_t>(begin, args.key_start[row]);
    if (args.key_end) end = lesser<int64_t>(end, args.key_end[row]);
    return {begin, greater(begin, end)};
}

// A step cut into tasks of about equal work (keys x rows of queries). Without memory it only counts.
struct AttentionPlan {
    AttentionTask *tasks, *merges;
    int64_t num_tasks = 0, num_merges = 0, partials = 0;

    void add(const AttentionTask& task) {
        if (tasks) tasks[num_tasks] = task;
        ++num_tasks;
    }
    void add_merge(const AttentionTask& task) {
        if (merges) merges[num_merges] = task;
        ++num_merges;
    }
};

// Many query rows over one KV head are split by head, few over a long context by partitions.
void plan_tile(const AttentionArgs& args, AttentionPlan& plan, AttentionTask task, int64_t target) {
    const int kv_heads = args.kv_heads, rows = task.tokens * (args.heads / kv_heads);
    KeyRange all{0, 0};
    for (int64_t t = task.token; t < task.token + task.tokens; ++t) {
        const KeyRange r = key_range(args, task.row, t);
        if (r.begin < r.end) all = all.begin >= all.end ? r : KeyRange{lesser(all.begin, r.begin), greater(all.end, r.end)};
    }
    const int64_t first = all.begin / kPartition, last = (all.end + kPartition - 1) / kPartition, count = last - first;
    const int64_t head_work = (all.end - all.begin) * rows, work = head_work * kv_heads;
    task.part_begin = first;
    task.part_end = last;
    task.heads = kv_heads;
    task.partial = -1;
    if (work <= target) {
        plan.add(task);
    } else if (rows > kTaskRows / 2 || count == 1 || head_work <= target) {
        task.heads = 1;
        for (task.head = 0; task.head < kv_heads; ++task.head) plan.add(task);
    } else {
        const int64_t pieces = lesser(count, (work + target - 1) / target), start = plan.partials;
        task.partial = start;
        plan.add_merge(task);
        plan.partials += count * kv_heads * rows;
        for (int64_t i = 0; i < pieces; ++i) {
            task.part_begin = first + count * i / pieces;
            task.part_end = first + count * (i + 1) / pieces;
            task.partial = start + (task.part_begin - first) * kv_heads * rows;
            plan.add(task);
        }
    }
}

AttentionPlan plan_attention(const AttentionArgs& args, AttentionTask* tasks, AttentionTask* merges, int64_t target) {
    AttentionPlan plan{tasks, merges};
    const int per_tile = greater(1, kTaskRows / (args.heads / args.kv_heads));
    // Later queries see more keys: they come first, so that the last task to end is a short one.
    for (int row = args.rows - 1; row >= 0; --row)
        for (int end = args.query_start[row + 1]; end > args.query_start[row];) {
            const int begin = greater(args.query_start[row], end - per_tile);
            plan_tile(args, plan, {row, begin, end - begin, 0, 0, 0, 0, -1}, target);
            end = begin;
        }
    return plan;
}
