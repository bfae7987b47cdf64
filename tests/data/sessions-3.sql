BEGIN TRANSACTION;
CREATE TABLE sessions (
    tenant TEXT, cache_salt TEXT, name TEXT, state TEXT NOT NULL, model TEXT NOT NULL, tokenizer TEXT NOT NULL,
    token_ids BLOB NOT NULL, messages TEXT, num_turns INTEGER NOT NULL, created_s REAL NOT NULL, used_s REAL NOT NULL,
    checksum BLOB NOT NULL, PRIMARY KEY (tenant, cache_salt, name)
) WITHOUT ROWID
;
INSERT INTO "sessions" VALUES('acme','salt','plain','b10692c440f4e17c','m','t',X'0100000000000080',NULL,1,1002.0,1003.0,X'BBC47BCC54E0F049E0852A2729746652');
INSERT INTO "sessions" VALUES('default','','chat','60e3e382fcc6eb57','m','t',X'010000000200000003000000','[{"role": "user", "content": "\u00e9"}, {"role": "assistant", "content": "x"}]',1,1004.0,1005.0,X'593C8DAD6EE07E04C441C02B52ADDA51');
INSERT INTO "sessions" VALUES('default','','damaged','b5630fff84534352','m','t',X'0900000008000000',NULL,1,1000.0,1001.0,X'42AF1188A28B0971ABD696586CD1893D');
INSERT INTO "sessions" VALUES('default','','resp_1','b5debceed8894874','m','t',X'0100000002000000','{"messages": [{"role": "user", "content": "q"}], "instructions": "Be brief.", "response": {"status": "completed"}}',1,1006.0,1007.0,X'EA4B10749C857908632DC590EEB04CA2');
CREATE INDEX sessions_used ON sessions (tenant, used_s);
COMMIT;
PRAGMA user_version = 3;
