// The batch as `count` rows of some conversations: their slots, and of every slot the token that it reads next, with
// its position. Who joins and who leaves is written by the host, tokens and positions by the kernel that samples.
// uses: conversations

var<storage, read> batch: Rows;
